"""Experts under way, by a coordinator whose sites are played; also when it is killed or things change meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Never

import pytest
from coordinator.cases import ALICE, BOB, CAROL, PATIENCE, Running, running
from coordinator.expert_cases import DONE, accepted_job, accepted_plan, said
from coordinator.played import Replayed
from google.protobuf.json_format import ParseDict

from pier_coordinator.experts import execution
from pier_coordinator.experts.replan import replanned
from pier_coordinator.runs.sites import LEASE_SECONDS
from pier_coordinator.service.bounds import RULES
from pier_coordinator.store.sites import Refused
from pier_node.site.coordinator.expert_messages import experts
from pier_node.site.loop import Experts
from pier_proto.v1.coordinator_pb2 import Assignment

PLAN = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"), accepted_job(2, "lab-0", flops=3e9))


@asynccontextmanager
async def two_sites(folder: Path) -> AsyncIterator[Running]:
    async with running(folder) as run:
        if not run.coordinator.sites:
            await run.let_in(ALICE, BOB)
        for site in (ALICE, BOB):
            async with run.site(site) as caller:
                await caller.register(site)
        yield run


async def silence_all_but_bob(run: Running) -> None:
    async with run.site(BOB) as bob:
        lease = (await bob.register(BOB)).lease
        run.clock.now += LEASE_SECONDS + 1
        await bob.beat(BOB, lease)
    await run.coordinator.expire()


def ordered(run: Running, node: str) -> Experts:
    """What a site makes of its order; it is within the bounds of the wire."""
    assignment = ParseDict(run.coordinator.orders[node].assignment, Assignment())
    RULES.check(assignment)
    return experts(assignment.expert)


def numbers(run: Running, node: str) -> list[int]:
    return [job.number for job in ordered(run, node).jobs]


async def test_an_accepted_plan_gives_each_site_its_jobs_as_they_were_planned(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        alice, bob = ordered(run, ALICE.node), ordered(run, BOB.node)
    assert alice.jobs == (PLAN.jobs[0].job, PLAN.jobs[2].job)
    assert bob.jobs == (PLAN.jobs[1].job,)
    assert (alice.plan, alice.complete) == (PLAN.id, False)


async def test_a_plan_for_an_unknown_site_is_refused_and_so_is_another_one_meanwhile(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        with pytest.raises(Refused, match="no site lab-9"):
            await run.coordinator.experts.accept(accepted_plan(accepted_job(0, "lab-9"), sites=("lab-9",)))
        await run.coordinator.experts.accept(PLAN)
        with pytest.raises(Refused, match="is not complete"):
            await run.coordinator.experts.accept(PLAN)


async def test_a_site_that_comes_back_under_another_name_keeps_its_experts(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        async with run.site(BOB) as bob:
            await bob.register(BOB, name="barn")
        await run.coordinator.experts.look(1000.0)
        rows = run.coordinator.experts.told()["experts"]
        assert [row["site"] for row in rows] == ["lab-0", "barn", "lab-0"]
        assert [row["expected_seconds"] for row in rows] == [10.0, 10.0, 30.0]
    async with two_sites(tmp_path) as run, run.site(BOB) as bob:
        await bob.register(BOB, name="barn")
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
            await run.coordinator.experts.take(
                ALICE.node, [said(PLAN, ALICE.node, 0, problem="the text here is another")]
            )
            await run.coordinator.experts.look(1001.0)
            await alice.beat(ALICE, lease)
        assert 0 in numbers(run, BOB.node), "it can get another one, too"


async def test_the_last_expert_makes_the_ensemble_complete_and_lets_the_sites_go(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, **DONE), said(PLAN, ALICE.node, 2, **DONE)])
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, step=40)])
        assert [row["done"] for row in expert_run.told()["experts"]] == [100, 40, 100]
        assert not ordered(run, BOB.node).complete
        refused = {**DONE, "loss": 2.6, "accepted": False}
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **refused)])
        assert expert_run.told()["complete"]
        assert ordered(run, ALICE.node).complete
        assert ordered(run, BOB.node).complete
        assert [row["accepted"] for row in expert_run.told()["experts"]] == [True, False, True]
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "the expert of network is done: 2.5000 -> 2.6000 bits per byte, refused, its parent stands in" in texts


async def test_the_page_shows_who_trains_what_and_who_takes_over(tmp_path: Path) -> None:
    board = Replayed()
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
        await expert_run.look(1000.0)
        board.planned(expert_run.shown())
    shown = board.snapshot()["experts"]
    assert [(row["domain"], row["node"]) for row in shown["rows"]] == [
        ("topics", ALICE.node),
        ("network", ALICE.node),
        ("formats", BOB.node),  # all are done sooner so
    ]
    assert [row["seconds"] for row in shown["rows"]] == [10.0, 10.0, 30.0]


async def test_the_page_shows_how_far_each_expert_is(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        assert expert_run.shown() is None
        plan = accepted_plan(*PLAN.jobs, accepted_job(3, "lab-1"))
        await expert_run.accept(plan)
        shown = expert_run.shown()
        assert shown is not None
        assert (shown["plan"], shown["mode"], shown["seconds"]) == (plan.id, "auto", 20.0)
        assert {row["state"] for row in shown["rows"]} == {"waiting"}
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 2, step=40, training_loss=math.log(2) * 3)])
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE)])
        await expert_run.take(BOB.node, [said(plan, BOB.node, 1, **{**DONE, "loss": 2.6, "accepted": False})])
        keys = ("domain", "site", "state", "done", "loss", "parent_loss", "error")
        assert [tuple(row[key] for key in keys) for row in rows(run)] == [
            ("topics", "lab-0", "accepted", 100, 2.0, 2.5, 0.1),
            ("network", "lab-1", "refused", 100, 2.6, 2.5, 0.1),
            ("numbers", "lab-1", "waiting", 0, None, None, None),
            ("formats", "lab-0", "training", 40, pytest.approx(3.0), None, None),
        ]
        for node in (BOB.node, ALICE.node):
            await expert_run.take(node, [said(plan, node, 3, problem="the text here is another")])
            await expert_run.look(1000.0)
        assert (rows(run)[2]["site"], rows(run)[2]["state"]) == ("", "nobody")
        await expert_run.accept(plan)
        assert {row["state"] for row in rows(run)} == {"waiting"}, "it begins again"


def rows(run: Running) -> list[dict[str, Any]]:
    shown = run.coordinator.experts.shown()
    assert shown is not None
    return list(shown["rows"])


async def test_what_a_site_says_of_the_job_of_another_changes_nothing(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 0, **DONE), said(PLAN, BOB.node, 99, **DONE)])
        other: dict[str, Any] = {**said(PLAN, ALICE.node, 0, **DONE).body, "plan": "f" * 32}
        await expert_run.take(ALICE.node, [type(run.told[0])(0.0, "expert", ALICE.node, other)])
        assert not any(row["name"] for row in expert_run.told()["experts"])


async def test_jobs_of_a_lost_site_go_to_another_and_begin_again(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, **DONE), said(PLAN, ALICE.node, 2, step=50)])
        await silence_all_but_bob(run)
        await expert_run.look(1000.0)
        await expert_run.look(1059.0)
        assert numbers(run, BOB.node) == [1]
        await expert_run.look(1060.0)
        assert numbers(run, BOB.node) == [1, 2]
        assert numbers(run, ALICE.node) == [0]  # what it has done is done
        assert expert_run.told()["experts"][2]["done"] == 0
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "lab-1 trains the expert of formats from the start: lab-0 is silent for 60 s" in texts


async def test_a_site_that_has_come_takes_what_waits(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        run.wall.now += 1
        await run.let_in(CAROL, first=2)
        async with run.site(CAROL) as carol:
            await carol.register(CAROL, name="lab-2")
        assert ordered(run, CAROL.node).jobs == (), "it waits for work when it has caught up"
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, step=10)])
        await expert_run.look(1000.0)
        assert (numbers(run, ALICE.node), numbers(run, BOB.node), numbers(run, CAROL.node)) == ([0], [1], [2])
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, **DONE)])
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **DONE)])
        await expert_run.take(CAROL.node, [said(PLAN, CAROL.node, 2, **DONE)])
        assert ordered(run, CAROL.node).complete
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "lab-2 trains the expert of formats from the start: lab-2 has come" in texts


async def test_a_site_that_was_left_out_of_the_plan_is_left_out(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-0"), sites=("lab-0",))
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(plan)
        await run.coordinator.experts.look(1000.0)
        assert numbers(run, ALICE.node) == [0, 1]
        assert run.coordinator.orders[BOB.node].assignment == {"replica": {}}


async def test_what_waits_at_a_site_that_is_slower_than_planned_goes_to_another(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        jobs = [accepted_job(0, "lab-0"), accepted_job(1, "lab-1"), accepted_job(2, "lab-0"), accepted_job(3, "lab-1")]
        plan = accepted_plan(*jobs)
        await expert_run.accept(plan)
        for step, seconds in ((5, 20.0), (65, 32.0)):  # 10 s were planned for 100 steps
            await expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, step=step, seconds=seconds)])
        await expert_run.look(1000.0)
        assert numbers(run, ALICE.node) == [0, 2], "so may be the other one: it has said nothing yet"
        for step, seconds in ((0, 0.0), (99, 10.0)):
            await expert_run.take(BOB.node, [said(plan, BOB.node, 1, step=step, seconds=seconds)])
        await expert_run.look(1000.0)
        assert (numbers(run, ALICE.node), numbers(run, BOB.node)) == ([0], [1, 2, 3])
        before = run.coordinator.orders[ALICE.node].epoch
        await expert_run.look(1001.0)
        assert run.coordinator.orders[ALICE.node].epoch == before, "it is planned with that speed now"
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "lab-1 trains the expert of formats from the start: lab-1 trains 1.98 times as fast as planned" in texts


async def test_a_site_that_is_done_takes_what_waits_elsewhere(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"), accepted_job(2, "lab-1"))
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(plan)
        await expert_run.look(1000.0)
        assert numbers(run, BOB.node) == [1, 2]
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE)])
        await expert_run.look(1001.0)
        assert (numbers(run, ALICE.node), numbers(run, BOB.node)) == ([0, 2], [1])
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert "lab-0 trains the expert of formats from the start: lab-0 has nothing left to train" in texts


async def test_what_a_silent_site_has_is_not_taken_before_it_is_lost(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await silence_all_but_bob(run)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, **DONE)])
        await expert_run.look(1000.0)
        assert numbers(run, ALICE.node) == [0, 2]


async def test_a_site_that_comes_back_in_time_keeps_its_jobs(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
            run.clock.now += LEASE_SECONDS + 1
            await run.coordinator.expire()
            await run.coordinator.experts.look(1000.0)
            await alice.beat(ALICE, lease)
        await run.coordinator.experts.look(1059.0)
        run.clock.now += LEASE_SECONDS + 1
        await run.coordinator.expire()
        await run.coordinator.experts.look(1061.0)
        assert numbers(run, ALICE.node) == [0, 2]


async def test_a_site_that_cannot_train_an_expert_is_not_asked_again(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(PLAN)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
        await expert_run.look(1000.0)
        assert 1 in numbers(run, ALICE.node)
        assert 1 not in numbers(run, BOB.node)
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 1, problem="here too")])
        await expert_run.look(1001.0)
        assert expert_run.told()["experts"][1]["site"] is None
        await expert_run.take(ALICE.node, [said(PLAN, ALICE.node, 0, problem="nor this")])
        await expert_run.look(1002.0)
        assert 0 in numbers(run, BOB.node)
        await expert_run.accept(PLAN)  # what cannot be completed does not stand in the way
        assert numbers(run, BOB.node) == [1]
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert any(text.startswith("nobody else can train the experts of network") for text in texts)


async def test_all_of_it_outlasts_the_coordinator(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(PLAN)
        await run.coordinator.experts.take(BOB.node, [said(PLAN, BOB.node, 1, **DONE)])
        before = run.coordinator.experts.told()
    async with two_sites(tmp_path) as run:
        assert run.coordinator.experts.told() == before
        assert before["plan"] == PLAN.id


async def test_a_chain_stays_together_and_begins_again_as_a_whole(tmp_path: Path) -> None:
    begun = accepted_job(2, "lab-1").model_copy(update={"setup": 30.0})
    plan = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-0", after=0), begun)
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(plan)
        assert numbers(run, ALICE.node) == [0, 1]
        await expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE), said(plan, ALICE.node, 1, problem="no")])
        await expert_run.look(1000.0)
        assert numbers(run, BOB.node) == [2, 0, 1]
        assert expert_run.told()["experts"][0]["name"] is None


async def test_experts_of_the_only_site_wait_for_it_to_come_back(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), sites=("lab-0",))
    async with two_sites(tmp_path) as run:
        await run.coordinator.experts.accept(plan)
        run.clock.now += LEASE_SECONDS + 1
        await run.coordinator.expire()
        for now in (1000.0, 1060.0, 1061.0, 2000.0):
            await run.coordinator.experts.look(now)
        assert numbers(run, ALICE.node) == [0]
        await run.coordinator.experts.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE)])
        assert run.coordinator.experts.told()["complete"]
    texts = [fact.body["text"] for fact in run.told if fact.kind == "event"]
    assert len([text for text in texts if text.startswith("nobody else can train the experts of topics")]) == 1


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
        asyncio.run_coroutine_threadsafe(_awaited(change), loop).result(PATIENCE)
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


async def test_a_plan_that_comes_while_the_old_one_is_planned_anew_has_to_wait_for_what_comes_of_it(
    tmp_path: Path,
) -> None:
    """An expert of the old plan has no site. Whether it gets one decides which of the plans holds."""
    other = accepted_plan(accepted_job(0, "lab-1"), accepted_job(1, "lab-0"))
    async with two_sites(tmp_path) as run:
        expert_run, waiting = run.coordinator.experts, list[asyncio.Task[None]]()
        await expert_run.accept(PLAN)
        await silence_all_but_bob(run)
        for seconds in (1000.0, 1060.0):
            await expert_run.look(seconds)
        await expert_run.take(BOB.node, [said(PLAN, BOB.node, 1, problem="the text here is another")])
        await expert_run.look(1061.0)
        assert [row["site"] for row in expert_run.told()["experts"]] == ["lab-1", None, "lab-1"]

        async def accept() -> None:
            waiting.append(asyncio.create_task(expert_run.accept(other)))
            await asyncio.sleep(0)

        async with run.site(ALICE) as alice, while_planning(run, accept):
            await alice.beat(ALICE, (await alice.register(ALICE)).lease)
            await expert_run.look(1062.0)
        with pytest.raises(Refused, match=f"the plan {PLAN.id[:8]} is not complete"):
            await waiting[0]
        assert {ordered(run, site.node).plan for site in (ALICE, BOB)} == {PLAN.id}


async def test_of_two_plans_that_come_at_once_one_is_refused(tmp_path: Path) -> None:
    other = accepted_plan(accepted_job(0, "lab-1"), accepted_job(1, "lab-0"))
    async with two_sites(tmp_path) as run:
        both = await asyncio.gather(
            *(run.coordinator.experts.accept(plan) for plan in (PLAN, other)), return_exceptions=True
        )
        assert both[0] is None
        assert isinstance(both[1], Refused)
        assert {ordered(run, site.node).plan for site in (ALICE, BOB)} == {PLAN.id}


async def test_a_plan_that_is_over_gives_no_order_after_the_next_one(tmp_path: Path) -> None:
    """Its last expert is done, and the next plan is accepted before the sites are told."""
    old, new = accepted_plan(accepted_job(0, "lab-0")), accepted_plan(accepted_job(0, "lab-1"), lost_after_s=61.0)
    async with two_sites(tmp_path) as run:
        expert_run, add_facts = run.coordinator.experts, run.coordinator.store.add_facts
        await expert_run.accept(old)

        async def slowly(facts: Any) -> Any:
            run.coordinator.store.add_facts = add_facts  # type: ignore[method-assign]
            await expert_run.accept(new)
            return await add_facts(facts)

        run.coordinator.store.add_facts = slowly  # type: ignore[method-assign]
        await expert_run.take(ALICE.node, [said(old, ALICE.node, 0, **DONE)])
        assert {ordered(run, site.node).plan for site in (ALICE, BOB)} == {new.id}


async def test_an_expert_that_is_done_while_its_move_is_stored_stays_done(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), accepted_job(1, "lab-1"))
    async with two_sites(tmp_path) as run:
        expert_run = run.coordinator.experts
        await expert_run.accept(plan)
        await silence_all_but_bob(run)
        await expert_run.look(1000.0)
        reports: list[asyncio.Task[None]] = []
        store = run.coordinator.store.do

        async def slowly(*given: Any) -> Any:
            stored = await store(*given)
            await asyncio.sleep(0.3)
            return stored

        run.coordinator.store.do = slowly  # type: ignore[method-assign, assignment]

        async def report() -> None:
            reports.append(asyncio.create_task(expert_run.take(ALICE.node, [said(plan, ALICE.node, 0, **DONE)])))

        async with while_planning(run, report):
            await expert_run.look(1060.0)
        await asyncio.gather(*reports)
        await expert_run.look(1061.0)
        first = expert_run.told()["experts"][0]
        assert (first["site"], first["name"]) == ("lab-0", DONE["name"])
    async with two_sites(tmp_path) as run:
        assert run.coordinator.experts.told()["experts"][0]["name"] == DONE["name"], "nor does the disk forget it"


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
        async with asyncio.timeout(PATIENCE):
            await looks.acquire()
            await looks.acquire()
        watching.cancel()
    assert "could not be looked at" in caplog.text
