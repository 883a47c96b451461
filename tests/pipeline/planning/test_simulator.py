"""The compiled simulator: against a plain one, against arithmetic, and by what must hold of any schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pipeline.planning.cases import SOME, even, problem, problems, site
from pipeline.planning.plain import Plain

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.plan import Plan, random_plan
from pier_node.pipeline.planning.problem import Problem, Rules
from pier_node.pipeline.planning.simulator import Schedule, Task, makespan, simulate


@SOME
@given(problems(), st.integers(0, 100))
def test_as_the_plain_simulator_says(it: Problem, seed: int) -> None:
    plan = random_plan(it, seed)
    plain = Plain(it, plan)
    assert makespan(it, plan) == pytest.approx(plain.run(), abs=1e-6)
    ran = {(task.site, task.microbatch, round(task.start_s, 6)) for task in simulate(it, plan).tasks}
    assert ran == {(where, number, round(start, 6)) for where, number, _, start, _ in plain.ran}


def assert_holds(it: Problem, plan: Plan, schedule: Schedule) -> None:
    """One task at a time at a site; forwards, loss, backwards in turn along each path; memory never above its size."""
    by_site, by_case = defaultdict(list), defaultdict(list)
    for task in schedule.tasks:
        by_site[task.site].append(task)
        by_case[task.microbatch].append(task)
        assert task.arrival_s <= task.start_s + 1e-9
    for tasks in by_site.values():
        for task, after in pairwise(tasks):
            assert task.end_s <= after.start_s + 1e-9
    for number, tasks in by_case.items():
        path = plan.paths[number]
        assert [task.site for task in tasks] == [*path, path[0], *reversed(path)]
        length = it.path_length
        assert [task.kind for task in tasks] == ["forward"] * length + ["loss"] + ["backward"] * length
    assert_memory(it, by_site)


def assert_memory(it: Problem, by_site: dict[int, list[Task]]) -> None:
    for where, tasks in by_site.items():
        steps = [(task.start_s, 1) for task in tasks if task.kind == "forward"]
        steps += [(task.end_s, -1) for task in tasks if task.kind == "backward"]
        held = 0
        for _, step in sorted(steps):
            held += step
            assert held <= it.sites[where].memory
        assert held == 0


@SOME
@given(problems(), st.integers(0, 100))
def test_what_holds_of_any_schedule(it: Problem, seed: int) -> None:
    plan = random_plan(it, seed)
    schedule = simulate(it, plan)
    assert_holds(it, plan, schedule)
    assert simulate(it, plan) == schedule, "the same every time"
    assert all(0 <= part <= 1 for part in schedule.utilisation)
    assert all(task.start_s >= task.arrival_s - 1e-9 for task in schedule.tasks)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 3, 6])
def test_a_full_pipeline_of_equal_sites_takes_what_the_formula_says(stages: int, microbatches: int) -> None:
    """(S + B - 1) 2.5 c: every site does a forward and a backward in turn; of several, the loss is hidden."""
    sites = tuple(site(f"s{index}", memory=microbatches) for index in range(stages))
    it = Problem(sites, even(stages, 0.0), (1,) * stages, stages, microbatches)
    plan = Plan(tuple((index,) for index in range(stages)), ((tuple(range(stages)),) * microbatches,))
    assert makespan(it, plan) == pytest.approx(2.5 * (stages + microbatches - 1) + 0.25 * (microbatches == 1))


def test_one_microbatch_takes_its_unloaded_time() -> None:
    """2.75 c + 2.5 c at each further site, and every link both ways; gaps count only between tasks of one site."""
    it = problem(link_s=0.5, microbatches=1, waves=1, path_length=3, task_gap_s=0.1)
    plan = Plan(((0, 1), (2, 3), (4, 5)), (((0, 2, 4),),))
    assert makespan(it, plan) == pytest.approx(2.75 + 2 * 2.5 + 6 * 0.5)


def test_new_microbatches_come_last_and_memory_blocks_them() -> None:
    it = problem(2, stages=2, path_length=2, stage_sizes=(1, 1), microbatches=3, waves=1, link_s=0.0)
    it = replace(it, sites=(site("a", memory=1), site("b", memory=3)))
    plan = Plan(((0,), (1,)), (((0, 1),) * 3,))
    assert makespan(it, plan) == pytest.approx(3 * 5.25), "one at a time"


def test_transfers_may_share_an_uplink() -> None:
    it = problem(3, stages=2, path_length=2, stage_sizes=(1, 2), microbatches=2, waves=1, link_s=4.0)
    plan = Plan(((0,), (1, 2)), (((0, 1), (0, 2)),))
    shared = replace(it, uplink_s=(4.0, 0.0, 0.0))
    schedules = simulate(it, plan), simulate(shared, plan)
    alone, waited = (next(task.arrival_s for task in one.tasks if task.site == 2) for one in schedules)
    assert alone == pytest.approx(2.0 + 4.0)
    assert waited == pytest.approx(1.0 + 4.0 + 4.0), "until the first is out"
    assert makespan(shared, plan) > makespan(it, plan)


def test_memory_that_blocks_for_ever_is_an_error() -> None:
    """Two paths, each with a swap, hold what the other needs."""
    sites = (site("a", memory=2), site("b", memory=1), site("c", memory=1))
    rules = Rules(max_swaps=1)
    it = Problem(sites, even(3, 0.1), (1, 1, 1), 3, 2, rules=rules)
    plan = Plan(((0,), (1,), (2,)), (((0, 1, 2), (0, 2, 1)),))
    assert math.isinf(Plain(it, plan).run())
    with pytest.raises(PierError, match="this plan never ends"):
        simulate(it, plan)


def scaled(it: Problem, factor: float) -> Problem:
    def times(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * value for value in row)

    sites = tuple(
        replace(one, forward_s=factor * one.forward_s, backward_s=factor * one.backward_s, loss_s=factor * one.loss_s)
        for one in it.sites
    )
    changes: dict[str, Any] = {key: factor * getattr(it, key) for key in ("task_gap_s", "first_gap_s", "wave_s")}
    wire = tuple(times(row) for row in it.transfer_s)
    return replace(it, sites=sites, transfer_s=wire, uplink_s=times(it.uplink_s), **changes)


@SOME
@given(problems(), st.integers(0, 100))
def test_twice_all_times_is_twice_the_makespan(it: Problem, seed: int) -> None:
    plan = random_plan(it, seed)
    assert makespan(scaled(it, 2.0), plan) == pytest.approx(2 * makespan(it, plan), abs=1e-6)


@SOME
@given(problems(), st.data())
def test_renumbered_sites_have_the_same_schedule(it: Problem, data: st.DataObject) -> None:
    plan = random_plan(it, 1)
    order = data.draw(st.permutations(range(len(it.sites))))
    at = {site: index for index, site in enumerate(order)}
    wire = tuple(tuple(it.transfer_s[a][b] for b in order) for a in order)
    uplink = tuple(it.uplink_s[a] for a in order) if it.uplink_s else ()
    other = replace(it, sites=tuple(it.sites[a] for a in order), transfer_s=wire, uplink_s=uplink)
    stages = tuple(tuple(at[a] for a in sites) for sites in plan.stages)
    waves = tuple(tuple(tuple(at[a] for a in path) for path in wave) for wave in plan.waves)
    assert makespan(other, Plan(stages, waves)) == makespan(it, plan)


@SOME
@given(problems())
def test_nothing_to_wait_for_is_as_fast_as_it_gets(it: Problem) -> None:
    assume(it.microbatches > 1)
    plan = random_plan(it, 1)
    alone = max(makespan(replace(it, microbatches=1, waves=1), Plan(plan.stages, ((path,),))) for path in plan.paths)
    assert makespan(it, plan) >= alone - 1e-6
