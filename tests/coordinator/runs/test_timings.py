from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.timings import (
    BUCKETS,
    LATEST,
    RoundTimings,
    Segment,
    Segments,
    segment_of,
    shares,
    slowest,
    slowness_in_words,
)


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


NAMES = {"a": "lab-a", "b": "lab-b"}


def rows(count: int, compute: float, waiting: float, exchange: float = 1.0, retry: float = 0.0) -> list[Segment]:
    return [Segment(round, 0.0, compute, waiting, exchange, retry, 0.0) for round in range(1, count + 1)]


def test_the_slow_one_is_found_and_why() -> None:
    slow = slowest({"a": rows(10, 10, 20), "b": rows(10, 30, 0)})
    assert slow is not None
    assert (slow.node, slow.wins, slow.rounds, slow.cause) == ("b", 10, 10, "compute")
    assert (slow.busy, slow.others) == (31.0, 11.0)


def test_a_slow_line_is_named_as_the_cause() -> None:
    slow = slowest({"a": rows(5, 10, 9, exchange=1), "b": rows(5, 11, 0, exchange=9)})
    assert slow is not None
    assert slow.cause == "exchange"


def test_nobody_is_slow_when_all_take_about_the_same_time() -> None:
    assert slowest({"a": rows(10, 10, 0.5), "b": rows(10, 10.5, 0)}) is None


def test_nobody_is_slow_alone() -> None:
    assert slowest({"a": rows(10, 10, 0)}) is None
    assert slowest({}) is None


def test_shares_of_the_time_add_up() -> None:
    spent = shares(rows(4, compute=6, waiting=2, exchange=1, retry=1))
    assert spent == {"compute": 0.6, "waiting": 0.2, "exchange": 0.1, "retry": 0.1}
    assert shares([]) == {}


def test_it_is_said_in_words() -> None:
    said = slowness_in_words({"a": rows(10, 10, 20), "b": rows(10, 30, 0)}, NAMES, {})
    assert said == (
        "lab-b was slowest in 10 of 10 rounds: 31 s busy a round, the others 11 s; most of the difference is compute. "
        "Time went to: 65 % compute, 32 % waiting, 3 % exchange."
    )


def test_a_long_exchange_names_the_thinnest_line() -> None:
    uplinks = {"a": 30e6, "b": 0.5e6}
    said = slowness_in_words({"a": rows(3, 5, 0, exchange=5), "b": rows(3, 5, 0, exchange=5)}, NAMES, uplinks)
    assert said == (
        "No site held the others up. Time went to: 50 % compute, 50 % exchange. "
        "The thinnest uplink is that of lab-b: 4 Mbit/s."
    )


def test_without_rounds_it_says_so() -> None:
    assert slowness_in_words({}, {}, {}) == "No rounds yet."
