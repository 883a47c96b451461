from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.demo.plan import (
    FEWEST,
    MOST,
    Pace,
    cores,
    inner_steps,
    steps_within,
    synchronous_bytes,
    threads_for,
    write_run,
)
from pier_node.outer.schedule import start_steps, total_rounds


def test_bytes_of_synchronous_training(tmp_path: Path) -> None:
    three = write_run(tmp_path / "three.toml", sites=3, algorithm="pier", steps=600)
    two = write_run(tmp_path / "two.toml", sites=2, algorithm="pier", steps=1)
    assert synchronous_bytes(three, 1_037_696) == pytest.approx(2 * 4 * 1_037_696 * 2 / 3 * 600)
    assert synchronous_bytes(three, 1_037_696) == pytest.approx(3_320_627_200)
    assert synchronous_bytes(two, 1_000_000) == 4_000_000


def test_the_run_is_what_sites_read(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run.toml", sites=3, algorithm="pier", steps=600)
    assert (config.run.sites, config.model.preset, config.data.source) == (3, "llama-1m", "stdlib")
    assert (config.inner.total_steps, config.outer.inner_steps, config.outer.start) == (600, 20, "solo")
    assert start_steps(config) == 60
    assert total_rounds(config) // config.inner.eval_every >= 20


def test_noloco_needs_no_start(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run.toml", sites=3, algorithm="noloco", steps=600)
    assert (config.outer.algorithm, config.outer.inner_steps, start_steps(config)) == ("noloco", 20, 0)
    assert (total_rounds(config), config.inner.eval_every) == (30, 1)


def test_synchronous_rounds_are_not_all_validated(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run.toml", sites=2, algorithm="sync", steps=100)
    assert (total_rounds(config), config.inner.eval_every) == (100, 5)


@pytest.mark.parametrize(("steps", "expected"), [(1, 5), (30, 5), (60, 10), (120, 20), (1000, 20)])
def test_rounds_are_shorter_in_short_runs(steps: int, expected: int) -> None:
    assert inner_steps(steps) == expected


def test_steps_within_a_time() -> None:
    # A step of all: 3 sites x 4 x 128 tokens, a tenth of them alone and the rest two sites abreast.
    pace = Pace(tokens_per_second=6000.0, abreast=2)
    a_step = 3 * 4 * 128 * (0.1 + 0.9 / 2) / 6000 * 1.3 + 0.3 / 20
    assert steps_within(90.0, 3, "pier", pace) == int(90 / a_step) // 10 * 10 == 450


def test_synchronous_steps_take_longer() -> None:
    pace = Pace(tokens_per_second=6000.0, abreast=3)
    assert steps_within(90.0, 3, "sync", pace) < steps_within(90.0, 3, "diloco", pace)


@given(st.floats(0.1, 1e4), st.integers(2, 8), st.floats(1.0, 1e7), st.integers(1, 64))
def test_steps_are_bounded_and_round(seconds: float, sites: int, speed: float, abreast: int) -> None:
    steps = steps_within(seconds, sites, "pier", Pace(speed, abreast))
    assert FEWEST <= steps <= MOST
    assert steps % 10 == 0


def test_sites_share_the_cores() -> None:
    assert threads_for(1) == cores()
    assert threads_for(cores()) == threads_for(10 * cores()) == 1
