from __future__ import annotations

import tomllib

import pytest

from bench.boundary import Pace, boundary, run_toml
from pier_node.config.run import RunConfig


def test_what_is_left_without_steps_is_the_boundary() -> None:
    assert boundary(Pace(14.0, 1.0), Pace(38.0, 1.0), (6, 18)) == pytest.approx((2.0, 2.0))


def test_its_run_is_one() -> None:
    config = RunConfig.model_validate(tomllib.loads(run_toml("gpt2-small", 6, 4)))
    assert (config.inner.total_steps, config.outer.inner_steps) == (24, 6)
