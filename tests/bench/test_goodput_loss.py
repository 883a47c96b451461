"""The runs that are compared, and the table."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from rich.console import Console

from bench.goodput_loss import Run, Runs, run_text, table
from pier_node.config.run import RunConfig

KILLED = Run(steps=800, tokens=420_000, loss=1.53, kills=30, rounds=40, members=2.2, seconds=110.0)
PLAIN = Run(steps=547, tokens=420_100, loss=1.5, kills=0, rounds=28, members=3.0, seconds=50.0)


def test_runs_differ_by_what_they_are_asked_for_alone() -> None:
    one, other = (RunConfig.model_validate(tomllib.loads(run_text(*it))) for it in ((1, 800, False), (2, 547, False)))
    assert (one.run.seed, one.inner.total_steps) == (1, 800)
    assert (other.run.seed, other.inner.total_steps) == (2, 547)
    assert (one.model, one.outer, one.data) == (other.model, other.outer, other.data)
    assert one.inner.model_copy(update={"total_steps": 547}) == other.inner


def test_the_table_has_each_seed_and_their_mean() -> None:
    whole = replace(PLAIN, steps=800, tokens=614_400, loss=1.45)
    found = [Runs(1, KILLED, PLAIN, whole), Runs(2, replace(KILLED, loss=1.5), PLAIN, whole)]
    assert found[0].excesses == pytest.approx((0.02, 0.0552), abs=1e-4)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(found, 15.0))
    shown = capture.get()
    assert "validation loss; 3 sites, each killed every 15 s on average" in shown
    assert "420,000, 420,100, 614,400" in shown
    assert "+2.00%, +5.52%" in shown
    assert "1.5150 ± 0.0212" in shown
    assert "+1.00% ± 1.41%" in shown
