from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from pier_node.outer.mean import TALLEST, fractions, split

MAX = sys.float_info.max
RATES = st.lists(st.floats(1.0, 90.0), min_size=1, max_size=8)


def slowest(shares: list[float], rates: list[float]) -> float:
    """Seconds until the last member has sent its bytes, for a vector of one byte."""
    return max((1 + share * (len(rates) - 2)) / rate for share, rate in zip(shares, rates, strict=True))


def best(rates: list[float]) -> float:
    """The same for the best split there is: minimise t, such that 1 + f·(n - 2) <= b·t for all, Σ f = 1, f >= 0."""
    count = len(rates)
    found = linprog(
        [*[0.0] * count, 1.0],
        A_ub=np.hstack([(count - 2) * np.eye(count), -np.array(rates)[:, None]]),
        b_ub=[-1.0] * count,
        A_eq=[[*[1.0] * count, 0.0]],
        b_eq=[1.0],
    )
    return float(found.fun)


@given(RATES)
@settings(max_examples=60)
def test_no_other_split_is_faster(rates: list[float]) -> None:
    shares = fractions(rates)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    if len(rates) > 2:
        assert slowest(shares, rates) == pytest.approx(best(rates), rel=1e-6)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([7.0], [1.0]),
        ([1.0, 50.0], [0.5, 0.5]),
        ([10.0, 10.0, 10.0], [1 / 3] * 3),
        ([10.0, 10.0, 1.0], [0.5, 0.5, 0.0]),
        ([3.0, 2.0, 1.0], [0.8, 0.2, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25] * 4),
    ],
)
def test_known_splits(rates: list[float], expected: list[float]) -> None:
    assert fractions(rates) == pytest.approx(expected)


def test_a_bandwidth_not_known_yet_counts_as_the_typical_one() -> None:
    assert fractions([8.0, 0.0, 8.0]) == pytest.approx([1 / 3] * 3)


def test_a_bandwidth_beyond_belief_is_cut() -> None:
    assert fractions([1.0, 1.0, 1e12]) == pytest.approx(fractions([1.0, 1.0, TALLEST]))
    assert fractions([MAX] * 3) == pytest.approx([1 / 3] * 3)


@given(st.integers(0, 10_000), st.lists(st.floats(0, MAX), min_size=1, max_size=12))
def test_shards_cover_the_vector_exactly_and_in_order(length: int, bandwidths: list[float]) -> None:
    shards = split(length, bandwidths)
    assert len(shards) == len(bandwidths)
    covered = [element for offset, size in shards for element in range(offset, offset + size)]
    assert covered == [*range(length)]
    assert all(size >= 0 for _, size in shards)
