"""How long to wait, and what the planner is told."""

from __future__ import annotations

from pier_node.pipeline.times import Pace, Silence


def test_a_wait_is_several_times_the_longest_seen() -> None:
    silence = Silence()
    assert silence.seconds() == Silence.INITIAL
    for _ in range(40):
        silence.saw(0.1)
    assert silence.seconds() == Silence.FLOOR
    silence.saw(20.0)
    assert silence.seconds() == 120.0


def test_tasks_and_transfers_are_told_by_their_medians() -> None:
    pace = Pace()
    assert pace["forward"] == 0.0
    for seconds in (40.0, 1.0, 9.0, 2.0):
        pace.saw(1, 3, seconds)
    for seconds in (0.75, 0.5):
        pace.saw(3, 3, seconds)
    for seconds in (14.0, 4.0):
        pace.saw(4, 3, seconds)
    pace.sent("b", 0.25)
    assert (pace["forward"], pace["loss"], pace["backward"]) == (2.0, 0.5, 4.0)
    assert pace.transfers() == {"b": 0.25}


def test_the_first_task_of_a_kind_says_nothing() -> None:
    pace = Pace()
    pace.saw(4, 3, 14.3)
    assert pace["backward"] == 0.0
    pace.saw(0, 3, 2.0)
    assert pace["forward"] == 0.0
    pace.saw(4, 3, 0.05)
    assert (pace["forward"], pace["backward"]) == (0.0, 0.05)
