from __future__ import annotations

import pytest

from pier_node.base.units import age, amount, count, number, percent, printable, rate, seconds, several, span


def test_numbers_that_are_not_known_yet_are_dashes() -> None:
    assert [number(None, 4), count(None), percent(None)] == ["-"] * 3
    assert [number(3.14159, 4), count(12345.6), percent(0.874)] == ["3.1416", "12,346", "87 %"]


def test_there_may_be_one_of_a_thing() -> None:
    shown = [several(value, "round") for value in (0, 1, 2, 12_345)]
    assert shown == ["0 rounds", "1 round", "2 rounds", "12,345 rounds"]
    assert [several(2, thing) for thing in ("batch", "loss", "box", "site")] == [
        "2 batches",
        "2 losses",
        "2 boxes",
        "2 sites",
    ]


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (12_345_678, "12.3 MB"), (4e9, "4 GB"), (7.5e15, "7.5e+03 TB")],
)
def test_bytes(size: float, shown: str) -> None:
    assert amount(size) == shown


@pytest.mark.parametrize(
    ("bytes_a_second", "shown"), [(12_500, "0.1 Mbit/s"), (11_787_500, "94.3 Mbit/s"), (1.25e9, "10 Gbit/s")]
)
def test_lines_are_as_fast_as_their_bits(bytes_a_second: float, shown: str) -> None:
    assert rate(bytes_a_second) == shown


@pytest.mark.parametrize(("time", "shown"), [(0.0421, "42.1 ms"), (0.9996, "1e+03 ms"), (12.34, "12.3 s")])
def test_times_that_were_measured(time: float, shown: str) -> None:
    assert seconds(time) == shown


@pytest.mark.parametrize(
    ("time", "shown"), [(5, "5 s"), (119, "119 s"), (300, "5 min"), (7200, "2 h"), (259_200, "3 days")]
)
def test_ages(time: float, shown: str) -> None:
    assert age(time) == shown


@pytest.mark.parametrize(
    ("time", "shown"), [(45.24, "45.2 s"), (300, "5 min"), (8068, "2.24 h"), (600_000, "6.94 days"), (119.9, "120 s")]
)
def test_times_that_something_will_take(time: float, shown: str) -> None:
    assert span(time) == shown


def test_nothing_but_letters_reaches_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x07é") == "a\ufffd[2Jb\tc\nd\ufffdé"
