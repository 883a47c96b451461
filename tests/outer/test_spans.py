"""How long to wait, and what the planner is told."""

from __future__ import annotations

from pier_node.outer.times import Pace, Recent, Silence


def test_a_wait_is_several_times_the_longest_seen() -> None:
    silence = Silence()
    assert silence.seconds() == 120.0
    for _ in range(40):
        silence.saw(0.1)
    assert silence.seconds() == 30.0
    silence.saw(20.0)
    assert silence.seconds() == 120.0


def test_a_wait_that_was_too_short_is_doubled_until_waits_are_known_again() -> None:
    silence = Silence(initial=50.0, floor=30.0, few=2)
    for _ in range(2):
        silence.saw(0.1)
    silence.late()
    assert silence.seconds() == 60.0
    silence.saw(55.0)
    silence.late()
    assert silence.seconds() == 120.0
    for _ in range(2):
        silence.saw(100.0)
    assert silence.seconds() == 600.0
    for _ in range(10):
        silence.late()
    assert silence.seconds() == Silence.LONGEST


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


def iterations(recent: Recent, until_forgotten: int) -> int:
    """How many go by without it until it is forgotten."""
    for number in range(1, until_forgotten + 1):
        recent.over()
        if not recent.median:
            return number
    return 0


def test_what_was_not_done_for_long_is_forgotten_and_later_each_time() -> None:
    recent = Recent()
    for missed in (Recent.FIRST, 2 * Recent.FIRST, 4 * Recent.FIRST):
        recent.saw(7.0)
        recent.over()
        assert iterations(recent, Recent.LAST) == missed
    for _ in range(10):
        recent.saw(7.0)
        recent.over()
        longest = iterations(recent, 2 * Recent.LAST)
    assert longest == Recent.LAST


def test_what_is_done_again_for_some_time_is_as_at_first() -> None:
    recent = Recent()
    recent.saw(7.0)
    recent.over()
    iterations(recent, Recent.LAST)
    for _ in range(Recent.FIRST):
        recent.saw(2.0)
        recent.over()
    assert iterations(recent, Recent.LAST) == Recent.FIRST


def test_a_site_without_work_is_unknown_again() -> None:
    pace = Pace()
    for _ in range(2):
        pace.saw(1, 3, 9.0)
    pace.sent("b", 0.5)
    for _ in range(Recent.FIRST + 1):
        assert (pace["forward"], pace.transfers()) == (9.0, {"b": 0.5})
        pace.over()
    assert (pace["forward"], pace.transfers()) == (0.0, {})
    pace.saw(1, 3, 1.0)
    assert pace["forward"] == 1.0
