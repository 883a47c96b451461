from __future__ import annotations

import tomllib

import pytest

from bench.boundary import Pace, boundary, of_calls, run_toml
from pier_node.config.run import RunConfig


def test_what_is_left_without_steps_is_the_boundary() -> None:
    assert boundary(Pace(14.0, 1.0, {}), Pace(38.0, 1.0, {}), (6, 18)) == pytest.approx((2.0, 2.0))


def test_its_run_is_one() -> None:
    config = RunConfig.model_validate(tomllib.loads(run_toml("gpt2-small", 6, 4)))
    assert (config.inner.total_steps, config.outer.inner_steps) == (24, 6)


def test_idle_is_from_the_last_step_of_a_round_to_the_first_of_the_next() -> None:
    calls = []
    for round in range(4):  # two steps of 1 s each, then 3 s of which an outer step takes 2 s
        calls += [{"part": "step", "began": 5.0 * round + step, "seconds": 1.0} for step in range(2)]
        calls.append({"part": "outer step", "began": 5.0 * round + 2.5, "seconds": 2.0})
    assert of_calls(calls, 2) == Pace(5.0, 3.0, {"outer step": 2.0})
