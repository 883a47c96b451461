"""The busiest second counts, not the mean of an exchange that somebody else held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pier_node.rounds.reduce import Meter


def test_nothing_sent() -> None:
    assert Meter(5.0).rate() == 0.0


def test_an_exchange_shorter_than_a_window_is_measured_whole() -> None:
    meter = Meter(10.0)
    meter.sent(300, 10.1)
    meter.sent(300, 10.5)
    assert meter.rate() == 1200.0


def test_a_fast_site_that_waits_for_a_slow_one_still_looks_fast() -> None:
    fast, slow = Meter(0.0), Meter(0.0)
    for tick in range(100):
        now = tick / 10
        fast.sent(1000 if now < 2 else 10, now)
        slow.sent(10, now)
    assert fast.rate() == 10_000.0
    assert slow.rate() == 100.0


def test_the_last_window_does_not_count_unless_it_is_whole() -> None:
    meter = Meter(0.0)
    meter.sent(10, 0.5)
    meter.sent(5000, 1.2)
    assert meter.rate() == 10.0


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100)), min_size=1))
def test_the_rate_is_never_above_what_was_sent_in_any_second(parts: list[tuple[int, float]]) -> None:
    meter = Meter(0.0)
    for count, now in sorted(parts, key=lambda part: part[1]):
        meter.sent(count, now)
    last = max(now for _, now in parts)
    assert 0 <= meter.rate() <= sum(count for count, _ in parts) / min(last, 1.0) if last else meter.rate() == 0
