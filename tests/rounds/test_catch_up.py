from __future__ import annotations

import pytest

from pier_node.rounds.catch_up import EVERY, Arrival

GB = 10**9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_said_now_and_then_with_speed_and_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    arrival = Arrival(clock)
    for step in range(41):
        clock.now = 100.0 + step
        arrival(step * GB // 10, 12 * GB)
    assert len(caplog.messages) == 40 // EVERY
    assert caplog.messages[0] == "1.5 GB of 12 GB of the run's state are here, at 800 Mbit/s, 105 s left"


def test_what_is_here_quickly_needs_no_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    arrival = Arrival(clock)
    arrival(GB // 2, GB)
    clock.now += 2 * EVERY
    arrival(GB, GB)
    assert caplog.messages == []


def test_pieces_that_came_before_a_peer_was_lost_are_not_speed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    arrival = Arrival(clock)
    arrival(10 * GB, 12 * GB)
    clock.now += EVERY
    arrival(10 * GB, 12 * GB)
    clock.now += EVERY
    arrival(11 * GB, 12 * GB)
    assert caplog.messages[0] == "10 GB of 12 GB of the run's state are here, at 0 Mbit/s"
    assert caplog.messages[1].endswith("11 GB of 12 GB of the run's state are here, at 267 Mbit/s, 30 s left")
