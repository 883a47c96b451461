"""The lower bounds of an iteration: against golden figures, and against all plans where they can be counted."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline.planning.cases import even, problem, site

from bench.paths_instances import Instance, instances
from pier_node.pipeline.planning.bounds import Bools, Floats, cheapest, lower_bounds
from pier_node.pipeline.planning.plan import Plan, violations
from pier_node.pipeline.planning.problem import Problem, Rules
from pier_node.pipeline.planning.simulator import NEVER, Ints, makespan, makespan_ns, rows, scratch, tables

BOUNDED = [it for it in instances() if it.bounds]


@pytest.mark.parametrize("it", BOUNDED, ids=lambda it: it.name)
def test_the_figures_of_the_reference_assignment(it: Instance) -> None:
    """The published figures allow swaps. Ours are exact without swaps, so above; and relaxed with them.

    The ascent on prices may end below the linear program, which ignores that memory cannot be full all the time.
    """
    plan = it.plan(it.known["fixed_assignment"])
    relaxed, exact = lower_bounds(it.problem, plan), lower_bounds(it.in_order, plan)
    assert exact.work_s == pytest.approx(it.bounds["lb_node_work"], abs=1e-3)
    assert relaxed.memory_s <= it.bounds["lb_crit_memory"] + 1e-3
    assert exact.memory_s >= 0.9999 * it.bounds["lb_crit_memory"]
    assert exact.load_s >= it.bounds["lb_lp_distinct"]
    assert lower_bounds(it.problem).best_s <= relaxed.best_s + 1e-9


@st.composite
def tiny(draw: st.DrawFn) -> Problem:
    """Few enough plans to try each."""
    count, sizes, length = draw(st.sampled_from([(4, (2, 2), 2), (5, (2, 1, 1), 3), (4, (1, 1, 2), 2), (3, (1, 1), 2)]))
    dice = random.Random(draw(st.integers(0, 1 << 32)))

    def times() -> tuple[float, ...]:
        return tuple(dice.randint(1, 40) / 10 for _ in range(count))

    return Problem(
        sites=tuple(site(f"s{at}", forward, dice.randint(1, 3)) for at, forward in enumerate(times())),
        transfer_s=tuple(times() for _ in range(count)),
        stage_sizes=sizes,
        path_length=length,
        microbatches=draw(st.integers(2, 3)),
        waves=draw(st.integers(1, 2)) if length == 2 else 1,
        rules=Rules(max_swaps=dice.randint(0, 1)),
        task_gap_s=draw(st.sampled_from([0.0, 0.1])),
        uplink_s=times() if draw(st.booleans()) else (),
    )


def every_plan(it: Problem) -> Iterator[Plan]:
    for order in permutations(range(len(it.sites)), sum(it.stage_sizes)):
        ends = [0, *accumulate(it.stage_sizes)]
        stages = tuple(tuple(order[a:b]) for a, b in pairwise(ends))
        if any([*sites] != sorted(sites) for sites in stages):
            continue
        orders = permutations(range(1, it.stages), it.path_length - 1)
        ways = [path for later in orders for path in product(stages[0], *(stages[stage] for stage in later))]
        for paths in product(ways, repeat=it.microbatches):
            first = it.wave_sizes[0]
            plan = Plan(stages, (paths[:first], paths[first:])[: it.waves])
            if not violations(it, plan):
                yield plan


@settings(max_examples=15, deadline=None)
@given(tiny())
def test_no_plan_at_all_is_below_a_bound(it: Problem) -> None:
    shortest: dict[tuple[tuple[int, ...], ...], float] = {}
    times, wave = tables(it), np.repeat(np.arange(it.waves), it.wave_sizes)
    room = scratch(len(it.sites), wave)
    for plan in every_plan(it):
        took = makespan_ns(times, room, rows(plan)[0], NEVER) / 1e9
        shortest[plan.stages] = min(took, shortest.get(plan.stages, math.inf))
    if shortest:
        assert lower_bounds(it).best_s <= min(shortest.values()) + 1e-6
    for stages, took in [*shortest.items()][:2]:
        assert lower_bounds(it, Plan(stages, ())).best_s <= took + 1e-6


@pytest.mark.parametrize("it", instances(), ids=lambda it: it.name)
def test_no_known_plan_is_below_a_bound(it: Instance) -> None:
    anywhere = lower_bounds(it.problem).best_s
    for form in it.known.values():
        assert anywhere <= form["makespan_s"]
    joint = it.known["joint"]
    assert lower_bounds(it.problem, it.plan(joint)).best_s <= joint["makespan_s"]


def one_stage_each(count: int, microbatches: int, places: int) -> tuple[Problem, Plan]:
    sites = tuple(site(f"s{at}", memory=places) for at in range(count))
    it = Problem(sites, even(count, 1.0), (1,) * count, count, microbatches)
    order = tuple(range(count))
    return it, Plan(tuple((at,) for at in order), ((order,) * microbatches,))


def test_bounds_that_are_reached() -> None:
    """One microbatch after the other: each takes 2.75 + 2.5 (S - 1) + 2 S seconds."""
    it, plan = one_stage_each(3, 4, 1)
    it = replace(it, waves=4)
    plan = Plan(plan.stages, tuple((path,) for path in plan.paths))
    bounds = lower_bounds(it, plan)
    assert bounds.memory_s == pytest.approx(4 * 13.75)
    assert bounds.load_s == pytest.approx(4 * 13.75)
    assert bounds.work_s == pytest.approx(4 * 2.75)
    assert makespan(it, plan) == pytest.approx(bounds.best_s)


def test_the_last_place_is_taken_after_the_forwards_before_it() -> None:
    it, plan = one_stage_each(2, 3, 3)
    assert lower_bounds(it, plan).memory_s == pytest.approx(2 * 1.0 + 2.75 + 2.5 + 4 * 1.0)


def test_a_site_that_is_full_raises_the_mean_load() -> None:
    """The near one of two sites can take half of the microbatches; the others go far.

    The four slots together are idle for 6 forwards at the start and 6 backwards at the end.
    """
    far = ((0.0, 1.0, 5.0), (1.0, 0.0, 9.0), (5.0, 9.0, 0.0))
    sites = tuple(site(f"s{at}", memory=memory) for at, memory in enumerate((4, 2, 2)))
    it = Problem(sites, far, (1, 2), 2, 4)
    plan = Plan(((0,), (1, 2)), (((0, 1), (0, 1), (0, 2), (0, 2)),))
    near_s, far_s = 2.75 + 2.5 + 4 * 1.0, 2.75 + 2.5 + 4 * 5.0
    assert lower_bounds(it, plan).load_s == pytest.approx((near_s + far_s) / 2 + 6 / 4 * 2.5, rel=2e-3)


def test_slow_sites_share_the_work() -> None:
    sites = (site("a", memory=4), site("b", memory=4), site("c", 3.0, memory=4))
    it = problem(3, stages=2, stage_sizes=(1, 2), sites=sites, microbatches=4, waves=1)
    plan = Plan(((0,), (1, 2)), (((0, 1), (0, 1), (0, 1), (0, 2)),))
    assert lower_bounds(it, plan).work_s == pytest.approx(4 * 2.75), "the origin; the others need 7.5"
    assert lower_bounds(it).work_s == pytest.approx(4 * 2.5), "any of the quick sites has four of the eight visits"


def test_each_visit_sends_two_tensors_over_the_uplink_of_its_site() -> None:
    """The data node sends eight, the first after a forward; the last one must arrive."""
    it, plan = one_stage_each(2, 4, 4)
    slow = replace(it, uplink_s=(10.0, 0.0))
    assert lower_bounds(slow, plan).work_s == pytest.approx(1.0 + 7 * 10.0 + 1.0)
    assert lower_bounds(slow, plan).best_s <= makespan(slow, plan)
    assert lower_bounds(slow).best_s == pytest.approx(1.0 + 7 * 10.0 + 1.0)


def test_a_slow_uplink_sends_fewer_microbatches_over_a_near_site() -> None:
    """The near one of two sites has time for five tensors in the time in which all could be done there."""
    far = ((0.0, 1.0, 5.0), (1.0, 0.0, 9.0), (5.0, 9.0, 0.0))
    sites = tuple(site(f"s{at}", memory=8) for at in range(3))
    it = Problem(sites, far, (1, 2), 2, 8, uplink_s=(0.0, 4.0, 0.0))
    plan = Plan(((0,), (1, 2)), ((),))
    free, slow = lower_bounds(replace(it, uplink_s=()), plan), lower_bounds(it, plan)
    assert slow.load_s > 1.05 * free.load_s


def test_a_path_visits_no_site_twice_in_a_bound() -> None:
    """Four near sites would otherwise be visited in turn; the fifth is far from them."""
    wire = tuple(tuple(0.0 if a == b else 0.1 if max(a, b) < 4 else 9.0 for b in range(5)) for a in range(5))
    sites = tuple(site(f"s{at}", memory=9) for at in range(5))
    it = Problem(sites, wire, (1,) * 5, 5, 1)
    assert lower_bounds(it).memory_s == pytest.approx(2.75 + 4 * 2.5 + 2 * (3 * 0.1 + 2 * 9.0))


def shortest(visit: Floats, hop: Floats, group: Ints, allowed: Bools, length: int) -> float:
    """The cheapest closed path from site 0, by trying all."""
    paths = ((0, *rest) for rest in permutations(range(1, len(visit)), length - 1))
    lawful = (
        path
        for path in paths
        if len({*group[[*path]]}) == length and all(allowed[group[a], group[b]] for a, b in pairwise(path))
    )
    return min(
        (sum(visit[[*it[1:]]]) + sum(hop[a, b] for a, b in pairwise([*it, 0])) for it in lawful), default=math.inf
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 6), st.booleans(), st.sampled_from([0, 5, 1000]))
def test_the_cheapest_path_is_that_of_trying_all(seed: int, length: int, grouped: bool, tries: int) -> None:
    """Two towns of near sites, in which cheap walks stay. A search that is given up is no dearer, but a closed walk."""
    dice, count = np.random.default_rng(seed), 7
    wire = dice.uniform(0.1, 2, (count, count)) + 4.0 * (np.arange(count)[:, None] % 2 != np.arange(count) % 2)
    group = dice.integers(0, 4, count) if grouped else np.arange(count)
    allowed = dice.uniform(size=(count, count)) < 0.8
    visit, hop, walk = dice.uniform(0, 1, count), wire + wire.T, np.zeros(length, np.int64)
    found = cheapest(visit, hop, group, allowed, 0, walk, tries)
    least = shortest(visit, hop, group, allowed, length)
    assert found <= least + 1e-9
    assert tries < 1000 or found == pytest.approx(least)
    if found < math.inf:
        assert found == pytest.approx(sum(visit[walk[1:]]) + sum(hop[a, b] for a, b in pairwise([*walk, 0])))
