"""A signal wakes those who wait, and remembers nothing."""

from __future__ import annotations

import asyncio

import pytest
from simulation.virtual_time import run

from pier_node.base.tasks import Signal


def test_it_wakes_all_who_wait() -> None:
    async def main() -> None:
        signal = Signal()
        waiting = [asyncio.create_task(signal.wait()) for _ in range(3)]
        await asyncio.sleep(1)
        signal.notify()
        await asyncio.wait_for(asyncio.gather(*waiting), 1)

    run(main())


def test_it_does_not_wake_who_comes_later() -> None:
    async def main() -> None:
        signal = Signal()
        signal.notify()
        before = asyncio.get_running_loop().time()
        await signal.wait(timeout=5)
        assert asyncio.get_running_loop().time() == pytest.approx(before + 5)

    run(main())


def test_until_looks_first_and_then_at_every_notice() -> None:
    async def main() -> None:
        signal = Signal()
        seen: list[int] = []
        await asyncio.wait_for(signal.until(lambda: True), 1)
        waiting = asyncio.create_task(signal.until(lambda: len(seen) == 2))
        for number in range(2):
            await asyncio.sleep(1)
            assert not waiting.done()
            seen.append(number)
            signal.notify()
        await asyncio.wait_for(waiting, 1)

    run(main())


def test_one_who_gave_up_is_forgotten() -> None:
    async def main() -> None:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait())
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(1)
        assert not signal._waiting
        signal.notify()

    run(main())
