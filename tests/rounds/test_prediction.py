"""Bytes of an exchange, and the part of its time that a site trains."""

from __future__ import annotations

from typing import Any

import pytest

from pier_node.config.run import RunConfig
from pier_node.rounds.prediction import exchange_bytes, share_of_compute


def config(**outer: Any) -> RunConfig:
    return RunConfig.model_validate({"inner": {"total_steps": 100_000}, "outer": outer})


def test_bytes_of_an_exchange() -> None:
    assert exchange_bytes(config(), 1000, 2) == 4000
    assert exchange_bytes(config(), 1000, 4) == 6000
    assert exchange_bytes(config(), 1000, 1) == 0
    assert exchange_bytes(config(codec="int4"), 1000, 2) == pytest.approx(4000 * 4.25 / 32)
    assert exchange_bytes(config(algorithm="noloco"), 1000, 4) == 4000, "to its partner only"


def test_with_overlap_only_what_outlasts_the_inner_steps_counts() -> None:
    assert share_of_compute(config(), 10.0, 5.0) == pytest.approx(2 / 3)
    assert share_of_compute(config(overlap=True), 10.0, 5.0) == 1.0
    assert share_of_compute(config(overlap=True), 10.0, 20.0) == 0.5
