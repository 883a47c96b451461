from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.base.tasks import until_stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_work_and_lets_it_clean_up(number: int) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    asyncio.run(until_stopped(work()))
    assert ended == ["cleaned up"]


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)

    asyncio.run(until_stopped(work()))
    assert codes == [130]


LINGERING = """
import asyncio, os, signal, sys
from pathlib import Path
from pier_node.base.tasks import until_stopped

async def work():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("leaving", flush=True)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        Path(sys.argv[1]).write_text("cleaned up")

asyncio.run(until_stopped(work()))
"""


def test_a_terminal_that_closes_ends_the_work_and_lets_it_clean_up(tmp_path: Path) -> None:
    """The shell sends SIGHUP as the kernel does, and nothing can be printed any more."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", LINGERING, str(tmp_path / "said")])
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        assert shown.readline() == b"ready\r\n"
    _, status = os.waitpid(child, 0)
    assert (status, (tmp_path / "said").read_text()) == (0, "cleaned up")


def test_under_nohup_the_terminal_does_not_matter() -> None:
    ended: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        ended.append("by itself")

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(until_stopped(work()))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == ["by itself"]


def test_what_went_wrong_is_raised() -> None:
    async def work() -> None:
        raise PierError("the port is taken")

    with pytest.raises(PierError, match="the port is taken"):
        asyncio.run(until_stopped(work()))
