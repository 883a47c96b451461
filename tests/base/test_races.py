"""Races, work that is finished, and tasks that are ended: nothing is left behind, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from pier_node.base.tasks import cancel_and_wait, first_of, run_to_end


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() - {asyncio.current_task()} <= before


class Work:
    """Work that says how far it came, and takes a while to end when it is cancelled."""

    def __init__(self) -> None:
        self.began, self.go, self.may_end, self.ended = (asyncio.Event() for _ in range(4))

    async def run(self, error: Exception | None = None) -> str:
        try:
            self.began.set()
            await self.go.wait()
        finally:
            await self.may_end.wait()
            self.ended.set()
            if error is not None:
                raise error
        return "done"


async def value(it: str) -> str:
    return it


async def fail(text: str) -> str:
    raise OSError(text)


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_the_first_to_end_counts_and_the_others_have_ended() -> None:
    work = Work()
    race = asyncio.create_task(first_of(work.run(), value("quick")))
    await turns()
    assert not race.done()  # the other one has not ended yet
    work.may_end.set()
    assert await race == "quick"
    assert work.ended.is_set()


async def test_the_first_named_counts_if_several_have_ended() -> None:
    assert await first_of(value("a"), value("b")) == "a"
    with pytest.raises(OSError, match="full"):
        await first_of(fail("full"), value("b"))


async def test_errors_of_others_that_have_ended_too_are_logged_and_nobody_misses_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: missed.append(context))
    with caplog.at_level(logging.INFO):
        assert await first_of(value("a"), fail("a full disk")) == "a"
        with pytest.raises(OSError, match="torn"):
            await first_of(fail("torn"), fail("a full disk"))
    gc.collect()
    await turns()
    assert missed == []
    assert caplog.text.count("a full disk") == 2


async def test_an_error_of_the_first_is_raised_after_the_others_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    work.may_end.set()
    with caplog.at_level(logging.INFO), pytest.raises(OSError, match="the disk is full"):
        await first_of(work.run(ValueError("later")), fail("the disk is full"))
    assert work.ended.is_set()
    assert "ValueError('later')" in caplog.text


async def test_an_error_of_a_cancelled_one_is_raised_too() -> None:
    work = Work()
    work.may_end.set()
    with pytest.raises(ValueError, match="while it ended"):
        await first_of(value("quick"), work.run(ValueError("while it ended")))


async def test_a_shielded_future_outlives_the_race() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    assert await first_of(asyncio.shield(future), value("quick")) == "quick"
    assert not future.done()
    future.set_result("slow")
    assert await first_of(asyncio.shield(future), asyncio.Event().wait()) == "slow"


@pytest.mark.parametrize("race", [lambda it: first_of(it, asyncio.Event().wait()), lambda it: first_of(it)])
async def test_a_cancelled_race_ends_all_and_is_cancelled(race: Callable[[Awaitable[str]], Awaitable[str]]) -> None:
    work = Work()
    task = asyncio.ensure_future(race(work.run()))
    await work.began.wait()
    for _ in range(3):  # the second and the third do not cut off what the work does at its end
        task.cancel()
        await turns()
        assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended.is_set()


async def test_a_cancellation_while_the_others_end_is_passed_on() -> None:
    work = Work()
    task = asyncio.create_task(first_of(work.run(), value("quick")))
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_around_a_race_is_kept() -> None:
    work = Work()
    work.may_end.set()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await first_of(work.run(), asyncio.Event().wait())
    assert work.ended.is_set()


async def test_work_is_finished_although_we_are_cancelled() -> None:
    work = Work()
    work.may_end.set()
    task = asyncio.create_task(run_to_end(work.run()))
    await work.began.wait()
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    work.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended.is_set()


async def test_finished_work_has_a_result_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    assert await run_to_end(value("it")) == "it"
    with pytest.raises(OSError, match="full"):
        await run_to_end(fail("full"))
    work = Work()
    work.may_end.set()
    task = asyncio.create_task(run_to_end(work.run(ValueError("unlucky"))))
    await work.began.wait()
    task.cancel()
    await turns()
    with caplog.at_level(logging.INFO):
        work.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "unlucky" in caplog.text


async def test_tasks_are_ended_and_what_they_end_with_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await cancel_and_wait()
    first, second, over = Work(), Work(), asyncio.create_task(fail("known already"))
    tasks = [asyncio.create_task(first.run()), asyncio.create_task(second.run(ValueError("unlucky"))), over]
    with suppress(OSError):
        await over
    with caplog.at_level(logging.INFO):
        ending = asyncio.create_task(cancel_and_wait(*tasks))
        await turns()
        assert not ending.done()
        first.may_end.set()
        second.may_end.set()
        await ending
    assert first.ended.is_set()
    assert second.ended.is_set()
    assert "unlucky" in caplog.text
    assert "known already" not in caplog.text
