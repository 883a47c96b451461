from __future__ import annotations

import asyncio
import os
import signal

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


def test_what_went_wrong_is_raised() -> None:
    async def work() -> None:
        raise PierError("the port is taken")

    with pytest.raises(PierError, match="the port is taken"):
        asyncio.run(until_stopped(work()))
