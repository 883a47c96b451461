from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.planning.cases import SOME, problem, problems, site

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.check import violations
from pier_node.pipeline.planning.problem import Problem, Rules
from pier_node.pipeline.planning.start import random_plan, stage_loads


@SOME
@given(problems(), st.integers(0, 1000))
def test_a_first_plan_is_allowed(it: Problem, seed: int) -> None:
    plan = random_plan(it, seed)
    assert violations(it, plan) == []
    assert random_plan(it, seed) == plan


def test_loads_of_stages() -> None:
    it = problem(stage_sizes=(2, 2, 2), path_length=2)
    assert stage_loads(it, 5) == (5, 3, 2)
    assert stage_loads(replace(it, path_length=3), 5) == (5, 5, 5)


def test_a_slow_site_has_less_to_do_where_there_is_room() -> None:
    sites = (site("a", memory=6), site("fast", memory=6), site("slow", 3.0, memory=6))
    it = problem(3, stages=2, stage_sizes=(1, 2), microbatches=4, waves=1, sites=sites)
    plan = random_plan(it, 1)
    visits = [path[1] for path in plan.paths]
    if plan.stages[1] == (1, 2):
        assert visits.count(2) < visits.count(1)


def test_too_little_memory_is_named() -> None:
    it = problem(stage_sizes=(2, 2, 2), path_length=3, microbatches=5, waves=1)
    with pytest.raises(
        PierError, match=r"2 sites of stage \d shall hold 5 microbatches in a wave, and have places for 4"
    ):
        random_plan(it, 1)


def test_jumps_that_leave_stages_out_are_named() -> None:
    it = problem(8, stages=4, path_length=2, microbatches=3, waves=1, rules=Rules(max_jump=1))
    said = "equal load cannot be kept: no paths of 2 stages visit all 4 stages equally often with jumps of at most 1"
    with pytest.raises(PierError, match=said):
        random_plan(it, 1)
    assert violations(replace(it, rules=Rules(max_jump=3)), random_plan(replace(it, rules=Rules(max_jump=3)), 1)) == []
