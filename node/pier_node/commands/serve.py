"""`pier-node serve`: answers over OpenAI's protocol until Ctrl+C, from a single model or an ensemble of experts."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web
from rich.console import Console

from pier_node.base.address import format_address, local_url, parse_address
from pier_node.base.errors import PierError
from pier_node.base.http import GOODBYE, make_runner
from pier_node.base.log import log_to, print_as_is
from pier_node.base.tasks import until_stopped
from pier_node.base.units import amount
from pier_node.experts.card import COLLECT, ENSEMBLE_FILE
from pier_node.experts.mixture import Kind, rule
from pier_node.experts.serving.app import make_app
from pier_node.experts.serving.decoding import Lost, Pool
from pier_node.experts.serving.generation import Asking
from pier_node.experts.serving.models import read_model, read_shelf
from pier_node.experts.serving.plugging import Plugs, Shelf
from pier_node.rounds.saved_model import pick_device
from pier_node.wire.addresses import free_port

PORT = 7720
ENSEMBLE = Path("ensemble")
GB = 1_000_000_000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeOptions:
    """The options of `pier-node serve`.

    Attributes:
        model: folder of a single model; None: an ensemble is served.
        experts: folder of the ensemble; None: ENSEMBLE, unless a single model is served.
        listen: HOST:PORT.
        top_k: number of experts that answer a request; 0: all.
        memory: GB for weights; 0: no limit.
        posterior: the rule of the mixture.
    """

    model: Path | None
    experts: Path | None
    listen: str
    top_k: int
    memory: float
    posterior: Kind
    device: str

    @property
    def ensemble(self) -> Path:
        """Folder of the ensemble, if one is served."""
        return self.experts or ENSEMBLE


def run_server(options: ServeOptions, quiet: bool) -> None:
    """Serve until stopped. Raises PierError."""
    console = Console()
    log_to(console, quiet)
    asyncio.run(until_stopped(_serve(options, console)))
    console.print("Stopped.")
    sys.stdout.flush()
    os._exit(0)  # the compute thread may be busy for long, and cannot be interrupted


def open_models(options: ServeOptions) -> Asking:
    """The model, or the ensemble, of a folder, ready for requests. Raises PierError."""
    if options.model:
        given = {"--experts": options.experts, "--top-k": options.top_k, "--posterior": options.posterior != "decay"}
        if unused := [name for name, value in given.items() if value]:
            raise PierError(
                f"{unused[0]} is for an ensemble, and --model serves a single model", "Give only one of them."
            )
        expert, tokenizer = read_model(options.model, pick_device(options.device))
        experts, name = [expert], expert.name
    else:
        if not options.ensemble.is_dir():
            raise PierError(
                f"{options.ensemble}: no such folder",
                "Serve a model with --model DIR, or an ensemble with --experts DIR.",
            )
        if not (options.ensemble / ENSEMBLE_FILE).exists() and (options.ensemble / "config.json").exists():
            raise PierError(
                f"{options.ensemble} is no ensemble: it has no {ENSEMBLE_FILE}",
                f"It is a single model: give it as --model {options.ensemble}.",
            )
        experts, tokenizer = shelf_of(options)()
        name = options.ensemble.resolve().name or "ensemble"
    pool = Pool(experts, int(options.memory * GB))
    pool.check_room(options.top_k)
    return Asking(name, tokenizer, pool, rule(options.posterior), options.top_k)


def shelf_of(options: ServeOptions) -> Shelf:
    """Reads the ensemble's folder, again at each call."""
    return partial(read_shelf, options.ensemble, pick_device(options.device))


async def _serve(options: ServeOptions, console: Console) -> None:
    host, port = parse_address(options.listen, PORT)
    free_port(host, port)
    asking = open_models(options)
    plugs = None if options.model else Plugs(asking, shelf_of(options))
    app = make_app(asking, plugs)
    runner = make_runner(app, shutdown_timeout=GOODBYE, handler_cancellation=True)
    await runner.setup()
    try:
        await asking.load()  # so that whoever reaches the port is answered
        await web.TCPSite(runner, host, port).start()
        _tell(asking, host, runner.addresses[0][1], console)
        await asyncio.Event().wait()
    except Lost as lost:
        if options.model:
            raise PierError(f"{options.model} cannot be loaded: {lost.__cause__}", "Copy the folder again.") from lost
        problem = f"{options.ensemble}: none of the experts can be loaded; the last: {lost.__cause__}"
        raise PierError(problem, COLLECT) from lost
    finally:
        await runner.cleanup()
        asking.close()


def _tell(asking: Asking, host: str, port: int, console: Console) -> None:
    here = local_url(host, port)
    for expert in asking.experts:
        log.info("%s: %s, %.3g GFLOPs a token", expert.name, amount(expert.size), expert.flops / 1e9)
    if host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("whoever reaches %s can ask: there is no password", format_address(host, port))
    print_as_is(console, f"The page:  {here}/\nClients:   base_url = {here}/v1, model = {asking.name}")
