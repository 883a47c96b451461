"""`pier-coordinator init | start`: creates the folder of a run, and runs its coordinator here until Ctrl+C."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import shlex
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from rich.console import Console

from pier_coordinator.identity.home import RUN_FILE, VIEWER_FILE, Home
from pier_coordinator.page.access import Access
from pier_coordinator.page.actions import Operator
from pier_coordinator.page.app import SITES_A_SECOND, make_app, make_public_app
from pier_coordinator.runs.compaction import Compaction
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.runs.pipeline import keep_drawn
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.service.service import CoordinatorService
from pier_coordinator.store.sites import WITNESS
from pier_coordinator.store.store import Store, unusable
from pier_node.base.address import format_address, local_url, parse_address
from pier_node.base.errors import PierError
from pier_node.base.http import GOODBYE, make_runner
from pier_node.base.log import log_to
from pier_node.base.tasks import until_stopped
from pier_node.commands.init import Wanted, missing_tokenizer
from pier_node.commands.init import init as write_run
from pier_node.config.presets import TOKENIZER
from pier_node.config.run import RunConfig, load
from pier_node.wire import tokenizer
from pier_node.wire.addresses import choose_address, free_port

log = logging.getLogger(__name__)

GLANCE = 0.5
"""Minimum seconds between two transfers of the sites' pulses and the experts' progress to the page's board. With many
sites it is as seldom as a tick of the page."""
TURN = 50
"""Number of sites transferred before calls get their turn."""
COLLECTIONS = (50_000, 20, 20)
"""Thresholds of the garbage collector (gc.set_threshold). There are hardly any cycles, and with a thousand sites a full
collection takes 0.1 s, during which no call is answered."""
SWITCH = 0.0001
"""Seconds after which a thread yields: the one that writes to the database waits for its turn at every statement."""


def init(folder: Path, preset: str) -> str:
    """Create the folder; return what to do next. Raises PierError, also if it already holds a run."""
    if (folder / RUN_FILE).exists():
        raise PierError(
            f"{folder} has a run already: {folder / RUN_FILE} exists",
            f"Start it with `pier-coordinator start {shlex.quote(str(folder))}`, or give another folder.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PierError(f"{folder}: {error.strerror}", "Give a folder that can be written.") from error
    name, path = run_name(folder), folder / RUN_FILE
    write_run(path, Wanted(preset, run={"witness": True, **({"name": name} if name else {})}), force=False)
    home = Home(folder)
    _ = home.identity, home.operator
    return (
        f"{path} says what the run trains: look through it, it cannot be changed later.\n"
        f"{missing_tokenizer(load(path), f'repeat this command after deleting {path}')}"
        f"Then start the coordinator:\n\n  pier-coordinator start {shlex.quote(str(folder))}\n"
    )


def run_name(folder: Path) -> str:
    """The name of a run: that of its folder, without what a run's name must not contain; "": nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-")[:64]


@dataclass(frozen=True)
class Settings:
    """The options of `pier-coordinator start`.

    Attributes:
        home: the run's folder.
        listen: HOST:PORT at which sites call.
        advertise: HOST[:PORT] at which sites reach the coordinator; None: choose one.
        page: HOST:PORT of the web page.
        hosts: further names of the page, NAME or NAME:PORT.
        private: the page needs a token.
        public: HOST:PORT of a page for everybody, without actions; None: there is none.
    """

    home: Home
    listen: str
    advertise: str | None
    page: str
    hosts: tuple[str, ...] = ()
    private: bool = False
    public: str | None = None


def run_coordinator(settings: Settings, quiet: bool, log_json: bool = False) -> None:
    """Run the coordinator until it is stopped. Raises PierError."""
    say = log_to(Console(), quiet, log_json)
    sys.setswitchinterval(SWITCH)
    gc.set_threshold(*COLLECTIONS)
    try:
        asyncio.run(until_stopped(_run(settings, say)))
    except (sqlite3.Error, zlib.error) as error:
        raise unusable(settings.home.database, error) from error
    say("Stopped; the sites train on, and report again when it is back.")


def _with_tokenizer(home: Home) -> RunConfig:
    """The run's configuration, with the folder's copy of its tokenizer.json, from which sites get theirs."""
    config = tokenizer.keep(home.config, home.folder)
    if config is None:
        log.warning(
            "data.tokenizer = %s: the file of the run is not here, so a site that joins must have it in its --data "
            "folder; copy it to %s and start again, and sites get it from here",
            home.config.data.tokenizer,
            home.folder / TOKENIZER,
        )
    return config or home.config


async def _run(settings: Settings, say: Callable[[str], None]) -> None:
    home, board = settings.home, ReadModel(config=settings.home.config)
    async with AsyncExitStack() as stack:
        compaction = Compaction(board)
        store = Store(home.database, compaction.told)
        stack.push_async_callback(store.close)
        compaction.restore(store)
        coordinator = Coordinator(store, await asyncio.to_thread(_with_tokenizer, home))
        if coordinator.config.run.witness:
            coordinator.witness = home.witness(store.meta(WITNESS) is not None)
        await coordinator.begin()
        host, port = parse_address(settings.listen)
        service = CoordinatorService(coordinator, home.credentials(), home.authority)
        port = await service.start(host, port)
        stack.push_async_callback(service.stop)
        choice = choose_address([], settings.advertise, format_address(host, port))
        access = Access(home.operator, _hosts(settings.page, settings), home.viewer if settings.private else "")
        app = make_app(board, Operator(coordinator, home, choice.address), access, _health(board))
        page = await _serve(stack, app, settings.page, "--page")
        home.announce(choice.address, page)
        stack.callback(home.leave)
        say(choice.why.replace("others reach this site", "Sites reach the coordinator", 1))
        say(f"The page: {page}" + (f", with the token in {home.folder / VIEWER_FILE}" if settings.private else ""))
        if settings.public:
            app = make_public_app(board, _health(board), _hosts(settings.public, settings))
            say(f"The public page: {await _serve(stack, app, settings.public, '--public')}")
        say(f"\nInvite a site:\n\n  pier-coordinator invite --data {shlex.quote(str(home.folder))} --name NAME\n")
        await asyncio.gather(
            coordinator.watch_over(),
            compaction.keep_small(store),
            _glance(coordinator, board, compaction),
            keep_drawn(coordinator, board),
        )


async def _glance(coordinator: Coordinator, board: ReadModel, compaction: Compaction) -> None:
    while True:
        for number, site in enumerate(coordinator.nodes()):
            if not compaction.busy:
                board.pulse(site["node"], site, site["alive"])
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
        board.problem = coordinator.store.problem
        board.planned(coordinator.experts.shown())
        await asyncio.sleep(max(GLANCE, len(board.sites) / SITES_A_SECOND))


def _hosts(address: str, settings: Settings) -> tuple[str, ...]:
    """The names under which browsers may ask for the page at an address."""
    return parse_address(address)[0], *settings.hosts


def _health(board: ReadModel) -> Callable[[], dict[str, object]]:
    began = time.time()
    return lambda: {"ok": not board.problem, "since": began, "problem": board.problem}


async def _serve(stack: AsyncExitStack, app: web.Application, address: str, option: str) -> str:
    """Serve an application at HOST:PORT; return its URL. Raises PierError, which names the option to change."""
    host, port = parse_address(address)
    free_port(host, port, option)
    runner = make_runner(app, shutdown_timeout=GOODBYE)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()
    return local_url(host, runner.addresses[0][1])
