"""Circuits: a first plan that is valid whatever the problem, and that uses near sites only, where it can."""

from __future__ import annotations

from hypothesis import given
from pipeline.planning.cases import SOME, problem, problems, site

from pier_node.pipeline.planning.circuits import circuits
from pier_node.pipeline.planning.plan import violations
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import makespan


@SOME
@given(problems())
def test_what_is_found_is_valid_and_the_same_for_a_seed(it: Problem) -> None:
    plan = circuits(it, 1, 200)
    assert plan is None or violations(it, plan) == []
    assert plan == circuits(it, 1, 200)


def test_each_town_is_a_circuit() -> None:
    """Four towns with a site for each of three stages."""
    near = tuple(tuple(0.1 if a % 4 == b % 4 else 9.0 for b in range(12)) for a in range(12))
    it = problem(12, stages=3, path_length=3, transfer_s=near)
    plan = circuits(it, 1, 20_000)
    assert plan is not None
    assert violations(it, plan) == []
    assert {frozenset(site % 4 for site in path) for path in plan.paths} == {frozenset([at]) for at in range(4)}


def test_a_faster_circuit_gets_more_microbatches() -> None:
    """Two circuits of two sites: one takes four turns while the other takes one."""
    sites = tuple(site(f"s{at}", speed, memory=1) for at, speed in enumerate((1.0, 1.0, 4.0, 4.0)))
    it = Problem(sites, tuple((0.0,) * 4 for _ in range(4)), (2, 2), 2, 5, waves=4)
    plan = circuits(it, 1, 2_000)
    assert plan is not None
    assert violations(it, plan) == []
    assert makespan(it, plan) < 22
    assert sum(path[0] in (0, 1) for path in plan.paths) == 4
