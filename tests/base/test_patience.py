from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.virtual_time import run

from pier_node.base.patience import FEW, MEMORY, MOST, SPREAD, Attempts, Backoff, LearnedWait

WAITS = st.lists(st.floats(0, 1e4), min_size=FEW, max_size=MEMORY)


def learned(waits: list[float], initial: float = 100.0, floor: float = 1.0) -> float:
    deadline = LearnedWait(initial, floor)
    for wait in waits:
        deadline.saw(wait)
    return deadline.seconds()


def test_what_was_seen_is_believed_only_when_it_is_enough() -> None:
    assert learned([2.0] * (FEW - 1)) == 100.0
    assert learned([2.0] * FEW) == 2.0


def test_median_and_spread() -> None:
    assert learned([10, 11, 12, 13, 14, 15, 16, 17, 18]) == 14 + SPREAD * 2


def test_a_quarter_of_wild_waits_moves_it_little() -> None:
    calm = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0]
    assert learned([*calm, 1e9, 1e9, 1e9]) < 40


def test_old_waits_are_forgotten() -> None:
    assert learned([1000.0] * MEMORY + [2.0] * MEMORY) == 2.0


def test_nobody_teaches_more_than_twice_the_first_patience() -> None:
    deadline = LearnedWait(initial=100.0, floor=1.0)
    for wait in range(10 * MEMORY):
        deadline.saw(deadline.seconds() * (0.5 if wait % 3 else 0.999))
    assert deadline.seconds() <= MOST * 100.0
    assert learned([1e9] * MEMORY) == MOST * 100.0


@given(WAITS, st.floats(0, 100))
def test_never_below_the_floor_nor_below_most_of_what_was_seen(waits: list[float], floor: float) -> None:
    seconds = learned(waits, floor=floor)
    assert seconds >= floor
    assert seconds == MOST * 100.0 or 2 * sum(wait <= seconds for wait in waits) >= len(waits)


def test_the_floor_holds_from_the_beginning() -> None:
    assert LearnedWait(initial=1.0, floor=5.0).seconds() == 5.0


def test_pauses_double_up_to_a_bound() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.seconds() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_log_says_every_quarter_of_a_minute_what_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        attempts, failures = Attempts("no peer answers yet", 60.0), 1
        while await attempts.failed("10.0.0.1:7700: connection refused"):
            failures += 1
        assert 60 < asyncio.get_running_loop().time() < 63
        return failures

    assert 25 < run(main()) < 45
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "no peer answers yet: 10.0.0.1:7700: connection refused; trying for 60 s more"
    assert len(said) == 4, said
