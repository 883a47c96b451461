from __future__ import annotations

import tomllib

import pytest

from bench.boundary import HIDDEN, Pace, Setting, boundary, of_calls
from pier_node.config.run import RunConfig


def test_what_is_left_without_steps_is_the_boundary() -> None:
    assert boundary((Pace(14.0, 1.0, {}), Pace(38.0, 1.0, {})), (6, 18)) == pytest.approx((2.0, 2.0))


def test_its_run_is_one() -> None:
    config = RunConfig.model_validate(tomllib.loads(Setting(sites=2, outer=HIDDEN).run_toml(8, 4)))
    assert (config.inner.total_steps, config.outer.inner_steps, config.outer.overlap) == (32, 8, True)


def test_a_round_is_idle_while_no_step_is_done() -> None:
    calls = []
    for round in range(4):  # two steps of 1 s each, then 3 s of which an outer step takes 2 s
        calls += [{"part": "step", "began": 5.0 * round + step, "seconds": 1.0} for step in range(2)]
        calls.append({"part": "outer step", "began": 5.0 * round + 2.5, "seconds": 2.0})
    assert of_calls(calls, 2) == Pace(5.0, 3.0, {"outer step": 2.0})
