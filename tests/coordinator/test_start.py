"""What `pier-coordinator start` prints when it ends; tests/processes has the rest."""

from __future__ import annotations

import asyncio
import os
import signal
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pier_coordinator.commands import start
from pier_coordinator.home import Home
from pier_node.errors import PierError

SETTINGS = start.Settings(Home(Path("my-run")), "127.0.0.1:0", None, "127.0.0.1:0")


def ended(monkeypatch: pytest.MonkeyPatch, problem: str = "", number: int = 0) -> str:
    """What is said by a coordinator that has a problem, or gets a signal."""

    async def run(_settings: start.Settings, _console: Console) -> None:
        if problem:
            raise PierError(problem)
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    monkeypatch.setattr(start, "_run", run)
    said = StringIO()
    asyncio.run(start._until_stopped(SETTINGS, Console(file=said)))
    return said.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_is_told_that_the_sites_train_on(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    assert ended(monkeypatch, number=number) == "Stopped; the sites train on, and report again when it is back.\n"


def test_it_does_not_say_that_it_was_stopped_when_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PierError, match="the port is taken"):
        ended(monkeypatch, "the port is taken")
