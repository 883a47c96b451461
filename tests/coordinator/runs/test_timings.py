from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.timings import BUCKETS, LATEST, RoundTimings, Segment, Segments, segment_of


def segment(
    round: int, compute: float = 10.0, waiting: float = 0.0, exchange: float = 2.0, retry: float = 0.0
) -> Segment:
    return Segment(round, 100.0 + round, compute, waiting, exchange, retry, 1000.0 * round)


def test_a_segment_is_read_from_a_fact() -> None:
    body = {"round": 3, "compute": 10, "waiting": 2.5, "exchange": None, "retry": -1, "bytes_sent": 7}
    read = segment_of(50.0, body)
    assert read == Segment(3, 50.0, 10.0, 2.5, 0.0, 0.0, 7.0)
    assert read is not None
    assert (read.duration, read.busy) == (12.5, 10.0)
    assert segment_of(50.0, {"compute": 1}) is None


def test_a_site_keeps_its_latest_rounds() -> None:
    segments = Segments()
    for round in range(1, LATEST + 51):
        segments.add(segment(round))
    assert len(segments) == LATEST
    assert segments.last(2) == [segment(LATEST + 49), segment(LATEST + 50)]
    assert [row.round for row in segments.between(249, 260)] == [249, 250]
    assert segments.between(1, 50) == []


def test_rounds_are_in_order_whenever_they_came() -> None:
    segments = Segments()
    for round in (3, 1, 2):
        segments.add(segment(round))
    assert [row.round for row in segments.last()] == [1, 2, 3]
    assert segments.busy(2, 3) == 12.0
    assert segments.busy(4, 9) == 0.0


def test_a_round_is_summed_up_over_its_sites() -> None:
    timeline = RoundTimings()
    timeline.add("a", segment(1, compute=10, waiting=6), 1)
    timeline.add("b", segment(1, compute=16, waiting=0, retry=4), 2)
    (row,) = timeline.rows()["rows"]
    assert row == {
        "first": 1,
        "compute": 13.0,
        "waiting": 3.0,
        "exchange": 2.0,
        "retry": 2.0,
        "longest": 22.0,
        "slowest": "b",
    }


def test_a_hundred_thousand_rounds_stay_small() -> None:
    timeline = RoundTimings()
    for round in range(1, 100_001):
        timeline.add("a", segment(round, compute=99.0 if round == 70_001 else 10.0), round)
    told = timeline.rows()
    assert len(timeline) <= BUCKETS
    assert told["width"] == 256
    assert max(row["longest"] for row in told["rows"]) == 101.0
    assert sum(1 for row in told["rows"] if row["longest"] > 12.0) == 1


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=1000))
def test_it_is_bounded_in_whatever_order_rounds_come(rounds: list[int]) -> None:
    timeline = RoundTimings()
    for stamp, round in enumerate(rounds, start=1):
        timeline.add("a", segment(round), stamp)
    assert len(timeline) <= BUCKETS
    firsts = [row["first"] for row in timeline.rows()["rows"]]
    assert firsts == sorted(set(firsts))
    assert all(row["compute"] == pytest.approx(10.0) for row in timeline.rows()["rows"])


def test_only_rounds_that_changed_are_told_again() -> None:
    timeline = RoundTimings()
    for round in (1, 2, 3):
        timeline.add("a", segment(round), round)
    timeline.add("b", segment(2), 9)
    told = timeline.rows(since=3)
    assert [row["first"] for row in told["rows"]] == [2]
    assert not told["reset"]
