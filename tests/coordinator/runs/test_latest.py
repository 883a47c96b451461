from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.read_model import WINDOW, Latest


def taken(*told: tuple[str, float, float]) -> Latest:
    latest = Latest()
    for node, time, value in told:
        latest.take(node, time, value)
    return latest


def test_the_latest_values_of_all_sites_are_added() -> None:
    assert taken(("a", 0.0, 10.5)).sum == 10.5
    assert taken(("a", 0.0, 10.5), ("b", 1.0, 20.0)).sum == 30.5
    assert taken(("a", 0.0, 10.5), ("b", 1.0, 20.0), ("a", 2.0, 11.0)).sum == 31.0


def test_the_mean_is_that_of_all_sites_whoever_told_last() -> None:
    assert taken(("a", 0.0, 2.394), ("b", 0.5, 2.337), ("c", 1.0, 2.608)).mean == pytest.approx(2.446333)
    assert taken(("a", 0.0, 2.394), ("c", 1.0, 2.608), ("b", 9.5, 2.337)).mean == pytest.approx(2.446333)


def test_a_site_that_says_nothing_is_not_counted_any_more() -> None:
    told = ("a", 0.0, 10.0), ("b", WINDOW, 20.0), ("b", WINDOW + 1, 20.0)
    assert (taken(*told).sum, taken(*told).mean) == (20.0, 20.0)


def test_a_site_that_has_gone_is_forgotten_at_once() -> None:
    latest = taken(("a", 0.0, 10.0), ("b", 1.0, 20.0))
    assert (latest.forget("a"), latest.forget("a"), latest.sum, latest.mean) == (True, False, 20.0, 20.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e4), st.floats(0, 1e9)), min_size=1))
def test_the_sum_does_not_drift(told: list[tuple[str, float, float]]) -> None:
    latest = taken(*told)
    assert latest.sum >= told[-1][2] - 1e-6
    for node in "abc":
        latest.take(node, 2e4, 0.0)
    latest.take("a", 2e4, 1.0)
    assert latest.sum == pytest.approx(1.0)
