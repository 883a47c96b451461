"""Waiting for what another process says: what was waited for, an error or silence ends it."""

from __future__ import annotations

import asyncio

import pytest
from simulation.virtual_time import run

from pier_node.base.tasks import Hearing


def test_what_is_waited_for_ends_it_however_long_it_takes_as_long_as_something_is_heard() -> None:
    async def main() -> float:
        hearing, said = Hearing(), 0

        async def talk() -> None:
            nonlocal said
            for _ in range(5):
                await asyncio.sleep(9)
                said += 1
                hearing.hear()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(talk())
            await hearing.expect(lambda: said == 5, 10, TimeoutError)
        return asyncio.get_running_loop().time()

    assert run(main()) >= 45


def test_silence_ends_it() -> None:
    async def main() -> None:
        await Hearing().expect(lambda: False, 10, lambda: RuntimeError("nothing for 10 seconds"))

    with pytest.raises(RuntimeError, match="nothing for 10 seconds"):
        run(main())


def test_an_error_ends_it_and_every_wait_after_it() -> None:
    async def main() -> None:
        hearing = Hearing()
        hearing.error = RuntimeError("it is gone")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="it is gone"):
                await hearing.expect(lambda: False, 10, TimeoutError)
        await hearing.expect(lambda: True, 10, TimeoutError)

    run(main())
