"""Replays a run: shows the facts of an event log, ordered by time, on the same page as when the run was live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from pier_coordinator.page import make_app
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact, number
from pier_coordinator.store.log import put_aside
from pier_node.base.errors import PierError

BATCH = 1000
"""Number of facts after which the event loop serves the page."""


def read_log(path: Path) -> list[Fact]:
    """The facts of an event log and of the log rotated before it, ordered by time.

    Raises:
        PierError: a log cannot be read, or a line of it is invalid; the message names the line.
    """
    before = _read(put_aside(path)) if put_aside(path).exists() else []
    known = {fact.number for fact in before}
    return sorted(before + [fact for fact in _read(path) if fact.number not in known], key=lambda fact: fact.time)


def _read(path: Path) -> list[Fact]:
    facts: list[Fact] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for at, line in enumerate(lines, start=1):
                facts.append(_fact(path, at, line))
    except (OSError, UnicodeDecodeError) as error:
        raise PierError(f"{path}: cannot read it: {error}", "Give the events.jsonl of a run.") from error
    return facts


def _fact(path: Path, at: int, line: str) -> Fact:
    try:
        fact = Fact.parse(line)
        if number(vars(fact), "time") is None or not isinstance(fact.node, str):
            raise ValueError("its time must be a number, and its node a text")
    except ValueError as error:
        remedy = "Take that line out, or give the events.jsonl of a run as it was written."
        raise PierError(f"{path}, line {at}: {error}", remedy) from error
    return fact


async def feed(
    board: ReadModel, facts: Sequence[Fact], speed: float, wait: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Feed facts to a board, `speed` times as fast as they happened; 0: all at once.

    Args:
        wait: awaited with the seconds until the next fact.
    """
    last = facts[0].time if facts else 0.0
    for at, fact in enumerate(facts):
        if at % BATCH == 0:
            await wait(0)
        if speed and fact.time > last:
            await wait((fact.time - last) / speed)
        last = fact.time
        board.apply(fact)


async def replay(path: Path, speed: float, port: int, ready: Callable[[str], None] = print) -> None:
    """Show an event log on 127.0.0.1 until cancelled.

    Args:
        speed: how many times as fast as the run; 0: all at once.
        port: port of the page; 0: any free port.
        ready: called with the page's address.

    Raises:
        PierError: the log is invalid, or the port is in use.
    """
    facts = read_log(path)
    board = ReadModel(clock=None)
    app = make_app(board, None, "", lambda: {"ok": True, "replay": str(path)})
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await _listen(runner, port)
        ready(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await feed(board, facts, speed)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> None:
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        raise PierError(f"port {port}: {error.strerror}", "Give another --port.") from error
