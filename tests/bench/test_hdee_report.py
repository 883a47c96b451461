"""The decision rule of bench/hdee.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hdee_report import OF_TWO, Verdict, best_of_two, gap, sign_test
from pier_node.experts.mixture import Array


def rows(shift: float, noise: float = 0.1, seeds: int = 3, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    return np.asarray(2.0 + shift + noise * random.standard_normal((seeds, 200)))


@pytest.mark.parametrize(("shift", "verdict"), [(-0.05, "win"), (0.0, "tie"), (0.05, "loss")])
def test_a_gap_that_is_beyond_chance_decides(shift: float, verdict: Verdict) -> None:
    found = gap([rows(shift)], [rows(0.0, seed=1)])
    assert found.verdict == verdict
    assert found.mean == pytest.approx(shift, abs=0.02)
    assert found.low < found.mean < found.high


def test_seeds_that_disagree_are_a_tie() -> None:
    other = rows(0.0, noise=0.0)
    own = other + np.array([[-0.3], [-0.3], [0.01]])
    found = gap([own], [other])
    assert found.high < 0
    assert found.seeds == pytest.approx((-0.3, -0.3, 0.01))
    assert found.verdict == "tie"


def test_domains_count_alike_whatever_their_rows() -> None:
    short, long = np.zeros((3, 10)), np.zeros((3, 1000))
    assert gap([short + 1, long - 1], [short, long]).mean == pytest.approx(0)


def test_rows_are_paired() -> None:
    """Rows differ by far more than the arms do."""
    hard = np.linspace(0, 5, 200)
    assert gap([rows(-0.02, 0.01) + hard], [rows(0.0, 0.01, seed=1) + hard]).verdict == "win"


def test_of_two_the_better_one_counts_and_has_to_be_surer() -> None:
    win, tie, loss = (gap([rows(shift)], [rows(0.0, seed=1)], OF_TWO) for shift in (-0.05, 0.0, 0.05))
    pairs = (win, loss), (tie, win), (tie, loss), (loss, loss)
    assert [best_of_two(*pair) for pair in pairs] == ["win", "win", "tie", "loss"]
    wide, narrow = (gap([rows(-0.05)], [rows(0.0, seed=1)], level) for level in (OF_TWO, 0.95))
    assert wide.high - wide.low > narrow.high - narrow.low


@pytest.mark.parametrize(
    ("wins", "ties", "losses", "chance"), [(8, 0, 0, 1 / 256), (7, 0, 1, 9 / 256), (5, 3, 0, 1 / 32), (0, 8, 0, 1.0)]
)
def test_the_sign_test_leaves_ties_out(wins: int, ties: int, losses: int, chance: float) -> None:
    counts: tuple[tuple[Verdict, int], ...] = (("win", wins), ("tie", ties), ("loss", losses))
    verdicts = [verdict for verdict, count in counts for _ in range(count)]
    assert sign_test(verdicts) == pytest.approx(chance)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_an_arm_ties_with_itself(seed: int) -> None:
    own = rows(0.0, seed=seed)
    assert gap([own], [own]).verdict == "tie"
