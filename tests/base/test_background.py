from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from pier_node.base.tasks import Background


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise OSError("the disk is full")


async def test_an_error_beside_the_work_ends_it_and_is_raised() -> None:
    background, ended = Background(), asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    async with AsyncExitStack() as stack:
        background.start(stack, for_ever())
        background.start(stack, fail())
        with pytest.raises(OSError, match="the disk is full"):
            await background.guard(work())
        assert ended.is_set()


async def test_work_that_is_done_ends_what_is_beside_it_with_the_stack() -> None:
    background, before = Background(), asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        background.start(stack, for_ever())
        await background.guard(asyncio.sleep(0))
        assert asyncio.all_tasks() - before
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_an_error_of_the_work_is_raised() -> None:
    async with AsyncExitStack() as stack:
        background = Background()
        background.start(stack, for_ever())
        with pytest.raises(OSError, match="the disk is full"):
            await background.guard(fail())
