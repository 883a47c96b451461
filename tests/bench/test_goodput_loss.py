"""What counts as the loss at so many tokens, and the table."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.goodput_figures import Commit
from bench.goodput_loss import EVERY, WAYS, Run, curve, excesses, run_text, table
from pier_node.config.run import load

PLAIN = Run(WAYS[0], 1, loss=1.5, first=5.2, kills=0, rounds=65, members=3.0, seconds=70.0)
KILLED = replace(PLAIN, way=WAYS[1], loss=1.53, kills=30, rounds=80, members=2.5)


def test_only_a_validation_of_that_round_counts_and_a_site_that_has_just_started_knows_none() -> None:
    commits = [
        Commit(3.0, 2 * EVERY, 2, 900, 1.5),
        Commit(1.0, EVERY, 3, 500, 2.0),
        Commit(1.5, EVERY + 1, 3, 600, 2.0),
        Commit(4.0, 3 * EVERY, 2, 1300, math.nan),
    ]
    assert list(curve(commits).items()) == [(500, 2.0), (900, 1.5)]


def test_the_run_differs_by_its_seed_alone_and_its_learning_rate_is_constant(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        (tmp_path / "run.toml").write_text(run_text(seed))
        runs.append(load(tmp_path / "run.toml"))
    assert [run.run.seed for run in runs] == [1, 2]
    assert (runs[0].inner, runs[0].outer, runs[0].data) == (runs[1].inner, runs[1].outer, runs[1].data)
    assert runs[0].inner.lr == runs[0].inner.min_lr


def test_the_table_has_each_seed_and_their_mean() -> None:
    found = {
        seed: {run.way: replace(run, seed=seed) for run in (PLAIN, replace(KILLED, loss=loss))}
        for seed, loss in ((1, 1.53), (2, 1.5))
    }
    assert excesses(found[1]) == pytest.approx([0.02])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(found, 1000, 15.0))
    shown = capture.get()
    assert "validation loss at 1,000 tokens; 3 sites, each killed every 15 s on average" in shown
    assert "+2.00%" in shown
    assert "+1.00% ± 1.41%" in shown
    assert "65, 80" in shown
