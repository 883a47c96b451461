from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.rates import WINDOW, Rates


def test_the_latest_rates_of_all_sites_are_added() -> None:
    rates = Rates()
    assert rates.take("a", 0.0, 10.5) == 10.5
    assert rates.take("b", 1.0, 20.0) == 30.5
    assert rates.take("a", 2.0, 11.0) == 31.0


def test_a_site_that_says_nothing_is_not_counted_any_more() -> None:
    rates = Rates()
    rates.take("a", 0.0, 10.0)
    rates.take("b", WINDOW, 20.0)
    assert rates.take("b", WINDOW + 1, 20.0) == 20.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e4), st.floats(0, 1e9)), min_size=1))
def test_the_sum_does_not_drift(told: list[tuple[str, float, float]]) -> None:
    rates, last = Rates(), 0.0
    for node, time, rate in told:
        last = rates.take(node, time, rate)
    assert last >= told[-1][2] - 1e-3
    for node in "abc":
        rates.take(node, 2e4, 0.0)
    assert rates.take("a", 2e4, 1.0) == pytest.approx(1.0)
