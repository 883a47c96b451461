"""Each constraint of spec/skippipe.md section 2, broken alone."""

from __future__ import annotations

import pytest
from pipeline.planning.cases import problem

from pier_node.pipeline.planning.check import violations
from pier_node.pipeline.planning.plan import Path, Plan
from pier_node.pipeline.planning.problem import Rules

STAGES = ((0, 1), (2, 3), (4, 5))
WAVE: tuple[Path, ...] = ((0, 2), (0, 4), (1, 3), (1, 5))
GOOD = Plan(STAGES, (WAVE, WAVE))
IT = problem(stage_sizes=(2, 2, 2), microbatches=8)
LONG = problem(stage_sizes=(2, 2, 2), path_length=3, microbatches=4, waves=1)


def test_a_good_plan() -> None:
    assert violations(IT, GOOD) == []
    assert violations(LONG, Plan(STAGES, (((0, 2, 4), (0, 2, 4), (1, 3, 5), (1, 3, 5)),))) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(((0,), (1, 2, 3), (4, 5)), (WAVE, WAVE)), "stages of [1, 3, 2] sites instead of [2, 2, 2]"),
        (Plan(((0, 1), (2, 3), (4, 6)), (WAVE, WAVE)), "there are no sites [6]"),
        (Plan(((0, 1), (2, 3), (4, 4)), (WAVE, WAVE)), "s4 holds 2 stages"),
        (Plan(STAGES, (WAVE,)), "waves of [4] microbatches instead of [4, 4]"),
        (Plan(STAGES, (WAVE, ((2, 0), *WAVE[1:]))), "path s2 > s0: does not begin at stage 0"),
        (Plan(STAGES, (WAVE, ((0, 2, 4), *WAVE[1:]))), "path s0 > s2 > s4: 3 stages instead of 2"),
        (Plan(STAGES, (WAVE, ((0, 2), (0, 2), (1, 3), (1, 5)))), "wave 1 visits the stages after the first unequally"),
        (Plan(STAGES, (WAVE, ((0, 2), (0, 4), (0, 3), (1, 5)))), "wave 1 visits s0 3 times, it can hold 2"),
    ],
)
def test_a_broken_constraint(plan: Plan, said: str) -> None:
    assert any(wrong.startswith(said) for wrong in violations(IT, plan)), violations(IT, plan)


def test_a_site_that_is_idle_is_not_visited() -> None:
    it = problem(7, stage_sizes=(2, 2, 2), microbatches=8)
    assert violations(it, Plan(STAGES, (WAVE, ((0, 6), *WAVE[1:])))) == ["paths visit sites [6], which hold no stage"]


@pytest.mark.parametrize(
    ("path", "rules", "said"),
    [
        ((0, 4, 2), Rules(), "1 swaps, 0 are allowed"),
        ((0, 4, 2), Rules(max_swaps=1, max_distance=0), "a swap over 1 stages, 0 are allowed"),
        ((0, 4, 2), Rules(max_swaps=1, max_total=0), "swaps over 1 stages together, 0 are allowed"),
        ((0, 4, 2), Rules(max_swaps=1, max_jump=1), "a jump over 2 stages, 1 are allowed"),
        ((0, 2, 3), Rules(), "visits a stage twice"),
        ((0, 4, 2), Rules(max_swaps=1), ""),
    ],
)
def test_the_order_of_stages(path: Path, rules: Rules, said: str) -> None:
    it = problem(stage_sizes=(2, 2, 2), path_length=3, microbatches=1, waves=1, rules=rules)
    found = [wrong for wrong in violations(it, Plan(STAGES, ((path,),))) if wrong.startswith("path")]
    assert [wrong.partition(": ")[2] for wrong in found] == ([said] if said else [])


def test_replicas_too_far_apart() -> None:
    near = problem(stage_sizes=(2, 2, 2), microbatches=8, max_intra_s=0.4)
    assert violations(near, GOOD) == ["two sites of a stage are 0.5 s apart, more than 0.4"]
