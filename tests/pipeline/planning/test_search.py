"""The search: what it finds is allowed, better than its start, the same for a seed, and right where that is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from pipeline.planning.cases import even, problem, problems, site

from bench.paths_instances import hundred, instances
from pier_node.base.errors import PierError
from pier_node.pipeline.planning.bounds import lower_bounds
from pier_node.pipeline.planning.plan import Plan, random_plan, sync_seconds, violations, worst_intra
from pier_node.pipeline.planning.problem import Matrix, Problem
from pier_node.pipeline.planning.search import search
from pier_node.pipeline.planning.simulator import makespan

QUICK: dict[str, Any] = {"seconds": 0.001, "deadline": 600.0}


def two_towns(count: int, far_s: float = 5.0) -> Matrix:
    """Even sites are in one town, odd ones in another."""
    return tuple(tuple(0.1 if (a - b) % 2 == 0 else far_s for b in range(count)) for a in range(count))


@settings(max_examples=15, deadline=None)
@given(problems())
def test_what_is_found_is_allowed_and_above_the_bounds(it: Problem) -> None:
    found = search(it, 1, **QUICK)
    assert violations(it, found.plan) == []
    assert found.complete
    assert found.makespan_s == makespan(it, found.plan)
    assert lower_bounds(it).best_s <= found.makespan_s + 1e-6
    assert lower_bounds(it, found.plan).best_s <= found.makespan_s + 1e-6


@pytest.mark.parametrize("name", ["geo42_25_s1", "geo9_25"])
def test_many_microbatches_and_few_steps(name: str) -> None:
    """Not every path has been touched when the search ends."""
    it = next(one.problem for one in instances() if one.name == name)
    found = search(it, 1, **QUICK)
    assert violations(it, found.plan) == []


def test_waves_of_unequal_sizes() -> None:
    it = problem(microbatches=7)
    assert violations(it, search(it, 1, **QUICK).plan) == []


@settings(max_examples=5, deadline=None)
@given(problems())
def test_a_seed_gives_one_plan(it: Problem) -> None:
    assert search(it, 3, **QUICK).plan == search(it, 3, **QUICK).plan


def test_paths_stay_in_their_town() -> None:
    it = problem(12, stages=3, path_length=2, transfer_s=two_towns(12))
    found = search(it, 1, **QUICK)
    assert all(len({site % 2 for site in path}) == 1 for path in found.plan.paths)
    assert found.makespan_s < makespan(it, random_plan(it, 1))


def test_the_best_of_all_full_pipelines_is_found() -> None:
    wire: Matrix = ((0.0, 1.0, 4.0, 2.0), (3.0, 0.0, 1.0, 5.0), (2.0, 2.0, 0.0, 1.0), (6.0, 1.0, 3.0, 0.0))
    sites = tuple(site(f"s{at}", 1 + at / 4) for at in range(4))
    it = Problem(sites, wire, (1, 1, 1), 3, 4, waves=2)
    every = [Plan(tuple((at,) for at in order), ((order,) * 2,) * 2) for order in permutations(range(4), 3)]
    assert search(it, 1, **QUICK).makespan_s == pytest.approx(min(makespan(it, plan) for plan in every))


def test_slow_sites_get_less_where_memory_allows() -> None:
    """No worse than the best with equal loads, which is a plan of less memory."""
    speeds = (1.0, 1.0, 1.0, 1.0, 4.0, 1.0)
    slow = tuple(site(f"s{at}", speed, memory=4) for at, speed in enumerate(speeds))
    it = problem(sites=slow, microbatches=8, waves=2)
    equal = replace(it, sites=tuple(replace(one, memory=2) for one in slow))
    found = search(it, 1, **QUICK)
    visits = [sum(path.count(at) for path in found.plan.paths) for at in range(6)]
    assert visits[4] < max(visits)
    assert found.makespan_s <= search(equal, 1, **QUICK).makespan_s + 1e-9


def test_less_latency_never_hurts_from_the_same_start() -> None:
    it = problem(transfer_s=two_towns(6))
    begin = search(it, 1, **QUICK).plan
    quicker = replace(it, transfer_s=even(6, 0.1))
    assert search(quicker, 1, current=begin, **QUICK).makespan_s <= search(it, 1, current=begin, **QUICK).makespan_s


def test_replanning_goes_on_from_the_current_plan() -> None:
    it = problem(transfer_s=two_towns(6))
    plan = random_plan(it, 5)
    found = search(it, 1, current=plan, **QUICK)
    assert violations(it, found.plan) == []
    assert found.plan.stages == plan.stages
    assert found.makespan_s <= makespan(it, plan)


def test_replicas_are_kept_near_to_each_other_if_that_is_wanted() -> None:
    it = problem(8, stages=4, path_length=2, transfer_s=two_towns(8), max_intra_s=0.2)
    found = search(it, 1, **QUICK)
    assert violations(it, found.plan) == []
    with pytest.raises(PierError, match=r"no stages found whose sites are at most 0.05 s apart"):
        search(replace(it, max_intra_s=0.05), 1, **QUICK)


def test_gradients_that_are_counted_draw_replicas_together() -> None:
    it = problem(8, stages=4, path_length=2, transfer_s=two_towns(8), gradient_s=two_towns(8, 50.0))
    found = search(it, 1, **QUICK)
    assert worst_intra(it.transfer_s, found.plan) == 0.1
    assert found.sync_s == sync_seconds(it, found.plan) == pytest.approx(2 * 1 / 2 * 0.1)
    assert found.iteration_s == found.makespan_s + found.sync_s


def test_with_many_sites_estimates_lead_far() -> None:
    """What little can be simulated of 100 sites in that time would come to a tenth less than a random plan."""
    it = hundred(1, regions=True)
    found = search(it, 1, seconds=0.5, deadline=600.0)
    assert violations(it, found.plan) == []
    assert found.makespan_s < 0.85 * makespan(it, random_plan(it, 1))


def test_with_no_near_sites_circuits_lead_further() -> None:
    """What estimates lead to takes 0.51 of the time of a random plan."""
    it = hundred(1, regions=False)
    found = search(it, 1, seconds=0.5, deadline=600.0)
    assert violations(it, found.plan) == []
    assert found.makespan_s < 0.47 * makespan(it, random_plan(it, 1))


def test_a_busy_machine_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is 0.025 s after the one before: 100 slices take longer than was asked for."""
    it = problem(12)
    quiet = search(it, 1, seconds=1.0, deadline=600.0)
    clock = count(step=0.025)
    monkeypatch.setattr("pier_node.pipeline.planning.search.time.monotonic", lambda: next(clock))
    busy = search(it, 1, seconds=1.0)
    assert busy.seconds > 2.0
    assert busy.complete
    assert busy.plan == quiet.plan


def test_an_annealing_that_is_late_leaves_slices_out_and_cools_down() -> None:
    parts: list[float] = []
    found = search(problem(), 1, 2.0, told=lambda part, _: parts.append(part), deadline=0.05)
    assert not found.complete
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_a_deadline_gives_the_best_so_far() -> None:
    told: list[tuple[float, float]] = []
    it = problem()
    found = search(it, 1, 5.0, told=lambda part, best_s: told.append((part, best_s)), deadline=1e-9)
    assert (found.complete, len(told)) == (False, 1)
    assert violations(it, found.plan) == []
    whole = search(it, 1, told=lambda part, best_s: told.append((part, best_s)), **QUICK)
    assert whole.complete
    assert [part for part, _ in told[1:]] == [pytest.approx(at / 100) for at in range(1, 101)]
    best = [best_s for _, best_s in told[1:]]
    assert best == sorted(best, reverse=True)
