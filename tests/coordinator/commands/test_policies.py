from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from pipeline.planning.cases import problem

from pier_coordinator.commands.paths import FULL, SKIP, full_pipeline, plan_paths
from pier_node.pipeline.planning.plan import random_plan, violations
from pier_node.pipeline.planning.problem import Problem

IT = problem(7, stages=3, path_length=2, stage_sizes=(3, 2, 2), microbatches=12, waves=2)


def test_a_full_pipeline_of_the_same_microbatches() -> None:
    """Two sites a stage, one idle; twelve microbatches, four at once: a wave more."""
    whole = full_pipeline(IT)
    assert (whole.stage_sizes, whole.path_length, whole.microbatches, whole.waves) == ((2, 2, 2), 3, 12, 3)
    plan = random_plan(whole, 1)
    assert violations(whole, plan) == []
    assert {len(path) for path in plan.paths} == {3}


@pytest.mark.parametrize("policy", ["full", "skip", "random"])
def test_a_plan_beside_its_rivals(policy: str) -> None:
    told: Counter[str] = Counter()
    outcome = plan_paths(IT, policy, 1, 0.01, lambda what, part, best_s: told.update([what]))  # type: ignore[arg-type]
    assert [*told] == ([FULL] if policy == "full" else [FULL, SKIP])
    it: Problem = outcome.problem
    assert violations(it, outcome.found.plan) == []
    assert it.path_length == (3 if policy == "full" else 2)
    assert outcome.any_bounds.best_s <= outcome.bounds.best_s + 1e-9
    assert outcome.bounds.best_s <= outcome.found.makespan_s == outcome.schedule.makespan_s
    assert outcome.gap >= 0
    if policy == "full":
        assert outcome.saved == 0
    if policy == "skip":
        assert outcome.saved > 0.1, "a third less work"


def test_a_problem_whose_full_pipeline_needs_no_more_waves() -> None:
    assert full_pipeline(replace(IT, microbatches=8)).waves == 2
