"""`pier-node serve`: serves an ensemble of experts over the completions protocol, until Ctrl+C."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from rich.console import Console
from rich.logging import RichHandler

from pier_node.base.address import format_address, parse_address
from pier_node.base.errors import PierError
from pier_node.base.tasks import until_stopped
from pier_node.base.units import amount
from pier_node.experts.mixture import Kind, rule
from pier_node.experts.serving.app import make_app
from pier_node.experts.serving.models import Pool, read_shelf
from pier_node.experts.serving.queue import Asking
from pier_node.rounds.weights import pick_device

PORT = 7720
GB = 1_000_000_000
GOODBYE = 2.0
"""Seconds that answers get to finish."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The options of `pier-node serve`.

    Attributes:
        experts: folder of the ensemble.
        listen: HOST:PORT.
        top_k: number of experts that answer a request; 0: all.
        memory: GB for weights; 0: no limit.
        posterior: the rule of the mixture.
    """

    experts: Path
    listen: str
    top_k: int
    memory: float
    posterior: Kind
    device: str


def run_server(settings: Settings, quiet: bool) -> None:
    """Serve until stopped. Raises PierError."""
    console = Console()
    handler = RichHandler(console=console, show_path=False, log_time_format="[%X]")
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(message)s", handlers=[handler])
    asyncio.run(until_stopped(_serve(open_ensemble(settings), settings.listen, console)))
    console.print("Stopped.")


def open_ensemble(settings: Settings) -> Asking:
    """The ensemble of a folder, ready for requests. Raises PierError."""
    experts, tokenizer = read_shelf(settings.experts, pick_device(settings.device))
    pool = Pool(experts, int(settings.memory * GB))
    pool.check_room(settings.top_k)
    name = settings.experts.resolve().name or "ensemble"
    return Asking(name, experts, tokenizer, pool, rule(settings.posterior), settings.top_k)


async def _serve(asking: Asking, listen: str, console: Console) -> None:
    host, port = parse_address(listen, PORT)
    runner = web.AppRunner(make_app(asking), access_log=None, shutdown_timeout=GOODBYE, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        _tell(asking, host, runner.addresses[0][1], console)
        await asyncio.Event().wait()
    except OSError as error:
        raise PierError(
            f"cannot listen at {listen}: {error.strerror}", "Choose another address with --listen HOST:PORT."
        ) from error
    finally:
        await runner.cleanup()
        asking.close()


def _tell(asking: Asking, host: str, port: int, console: Console) -> None:
    here = f"http://{format_address('127.0.0.1' if host in ('0.0.0.0', '::') else host, port)}"
    for expert in asking.experts:
        log.info("expert of %s: %s, %.3g GFLOPs a token", expert.name, amount(expert.size), expert.flops / 1e9)
    if host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("whoever reaches %s can ask: there is no password", format_address(host, port))
    console.print(f"The page:  {here}/", highlight=False, soft_wrap=True)
    console.print(f"Clients:   base_url = {here}/v1, model = {asking.name}", highlight=False, soft_wrap=True)
