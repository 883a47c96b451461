"""A plan of experts whose coordinator is killed, or around which things change at the wrong moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Never

import pytest
from coordinator.cases import ALICE, BOB, Running
from coordinator.expert_cases import DONE, accepted_job, accepted_plan, said
from coordinator.experts.test_run import PLAN, numbers, ordered, two_sites

from pier_coordinator.experts import execution
from pier_coordinator.experts.replan import replanned


class Killed(Exception):
    """No handler knows it."""


@contextmanager
def killed_before_it_orders(run: Running) -> Iterator[None]:
    """The coordinator dies, as far as one sees, when it is about to order the next time."""

    async def dies(*_: Any) -> Never:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(run.coordinator, "assign", dies)
        yield
        pytest.fail("nothing was to be ordered")


async def test_orders_of_an_accepted_plan_are_given_after_a_kill(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        with killed_before_it_orders(run):
            await run.coordinator.experts.accept(PLAN)
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.look(1000.0)
        assert (numbers(run, ALICE.node), numbers(run, BOB.node)) == ([0, 2], [1])
        before = run.coordinator.orders[ALICE.node].epoch
        await run.coordinator.experts.look(1001.0)
        assert run.coordinator.orders[ALICE.node].epoch == before


@pytest.mark.parametrize("restart", [True, False])
async def test_the_end_of_a_plan_is_told_after_a_kill_or_a_full_disk(tmp_path: Path, restart: bool) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"))
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(plan)
        await run.coordinator.experts.look(1000.0)
        with killed_before_it_orders(run):
            await run.coordinator.experts.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE)])
        if not restart:
            await run.coordinator.experts.look(1001.0)
            assert ordered(run, ALICE.node).complete
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.look(1000.0)
        assert ordered(run, ALICE.node).complete


async def test_a_job_that_moves_is_ordered_after_a_kill(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        await run.coordinator.experts.look(1000.0)
        await run.coordinator.experts.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
        with killed_before_it_orders(run):
            await run.coordinator.experts.look(1001.0)
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.look(1000.0)
        assert 1 in numbers(run, ALICE.node)
        assert 1 not in numbers(run, BOB.node)


async def test_what_a_site_declines_before_a_kill_goes_elsewhere_after_it(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        await run.coordinator.experts.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.look(1000.0)
        assert 1 in numbers(run, ALICE.node)


@asynccontextmanager
async def while_planning(run: Running, change: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Something else changes while the solver works."""
    loop = asyncio.get_running_loop()

    def solved(*args: Any) -> Any:
        patch.undo()
        asyncio.run_coroutine_threadsafe(_awaited(change), loop).result(10)
        return replanned(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "replanned", solved)
        yield


async def _awaited(change: Callable[[], Awaitable[Any]]) -> None:
    await change()


async def test_an_expert_that_is_done_while_it_is_planned_anew_stays_done(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
        done = [said(PLAN, ALICE.node, number, **DONE) for number in (0, 2)]
        async with while_planning(run, lambda: expert_run.take(ALICE.node, done)):
            await expert_run.look(1000.0)
        assert [bool(row["name"]) for row in expert_run.told()["experts"]] == [True, False, True]
        assert 1 in numbers(run, ALICE.node)


async def test_a_site_that_declines_while_it_is_planned_anew_does_not_get_it_back(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"))
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(plan)
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, problem="not here")])
        problem = said(plan, BOB.node, 1, problem="nor here")
        async with while_planning(run, lambda: expert_run.take(BOB.node, [problem])):
            await expert_run.look(1000.0)
        await expert_run.look(1001.0)
        assert (numbers(run, ALICE.node), numbers(run, BOB.node)) == ([1], [0])


async def test_a_site_that_is_revoked_while_it_is_planned_anew_gets_nothing(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
        async with while_planning(run, lambda: run.coordinator.revoke("lab-0")):
            await expert_run.look(1000.0)
        assert expert_run.told()["experts"][1]["site"] is None


async def test_a_plan_that_cannot_be_looked_at_does_not_end_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_sites(tmp_path) as run:
        looks = asyncio.Semaphore(0)

        async def broken(_now: float) -> Never:
            looks.release()
            raise KeyError("lab-0")

        monkeypatch.setattr(run.coordinator.experts, "look", broken)
        watching = asyncio.create_task(run.coordinator.watch_over())
        async with asyncio.timeout(30.0):
            await looks.acquire()
            await looks.acquire()
        watching.cancel()
    assert "could not be looked at" in caplog.text
