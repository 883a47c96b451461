"""Which rounds are iterations, and which are outer ones: whole runs, round by round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline.cases import config

from pier_node.config.run import RunConfig
from pier_node.outer.schedule import total_rounds
from pier_node.pipeline.vote_state import Standing, Turn, turn_of

RUNS = {
    "tttttt": None,
    "aamaamaam": {"algorithm": "pier", "inner_steps": 2, "start": "none"},
    "ttaamaam": {"algorithm": "pier", "inner_steps": 2},
    "aaaamaam": {"algorithm": "diloco", "inner_steps": 4},
    "aaaaaam": {"algorithm": "diloco"},
    "amamamamamam": {"algorithm": "diloco", "inner_steps": 1},
}


@pytest.mark.parametrize("rounds", RUNS)
def test_a_run_is_these_rounds(rounds: str) -> None:
    tables = config().model_dump(mode="json", exclude={"outer"})
    outer = RUNS[rounds]
    run = RunConfig.model_validate(tables | ({"outer": outer} if outer else {}))
    found, standing = "", Standing(0, 0.0, ())
    while turn := turn_of(run, standing):
        found += turn.value[0]
        steps = standing.steps + (turn is not Turn.MEET)
        standing = replace(standing, steps=steps, met=standing.met if turn is Turn.APART else steps)
    assert found == rounds
    assert total_rounds(run) == len(rounds)
