from __future__ import annotations

from pier_coordinator.runs.slowest import in_words, shares, slowest
from pier_coordinator.runs.timings import Segment

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
    said = in_words({"a": rows(10, 10, 20), "b": rows(10, 30, 0)}, NAMES, {})
    assert said == (
        "lab-b was slowest in 10 of 10 rounds: 31 s busy a round, the others 11 s; most of the difference is compute. "
        "Time went to: 65 % compute, 32 % waiting, 3 % exchange."
    )


def test_a_long_exchange_names_the_thinnest_line() -> None:
    uplinks = {"a": 30e6, "b": 0.5e6}
    said = in_words({"a": rows(3, 5, 0, exchange=5), "b": rows(3, 5, 0, exchange=5)}, NAMES, uplinks)
    assert said == (
        "No site held the others up. Time went to: 50 % compute, 50 % exchange. "
        "The thinnest uplink is that of lab-b: 4 Mbit/s."
    )


def test_without_rounds_it_says_so() -> None:
    assert in_words({}, {}, {}) == "No rounds yet."
