"""Whom the planner waits for: a site that fetches its stage; and whom it leaves out, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

from simulation.virtual_time import run

from pier_node.base.tasks import Signal
from pier_node.pipeline.plan_delivery import CATCHING_UP, MOST, Routing, Suspects
from pier_node.pipeline.vote_state import VoteState
from pier_proto.v1.peer_pb2 import Phase, Place, Pulse

AT, OLD, NEW = 7, 6 << 24, 7 << 24
POSITION: Any = Mock(coming=AT + 1, voted=VoteState(7, 3.0, (NEW, NEW)))
POSITION.config.pipeline.stages = 2


def pulse(version: int, training_for: int, phase: Phase.ValueType, round: int = AT) -> Pulse:
    return Pulse(place=Place(stage=1, version=version), training_for=training_for, phase=phase, round=round)


async def awaited(*said: tuple[float, Pulse]) -> list[bool]:
    """Whether a site is waited for that says these, each after so many seconds."""
    roster: Any = Mock()
    routing = Routing(Mock(roster=roster), Mock(), Mock(), POSITION, Signal())
    answers = []
    for seconds, each in said:
        await asyncio.sleep(seconds)
        roster.pulses.return_value = {"b": each}
        answers.append(routing._awaits())
    return answers


def test_a_site_that_lacks_the_last_step_is_awaited_until_it_has_it() -> None:
    lacks = pulse(OLD, AT, Phase.PHASE_EXCHANGING)
    fetches = pulse(OLD, AT, Phase.PHASE_CATCHING_UP)
    has = pulse(NEW, AT + 1, Phase.PHASE_TRAINING)
    said = (0.0, lacks), (1.0, fetches), (CATCHING_UP - 2, fetches), (0.5, has)
    assert run(awaited(*said)) == [True, True, True, False]


def test_it_is_not_awaited_for_ever() -> None:
    fetches = pulse(OLD, AT, Phase.PHASE_CATCHING_UP)
    assert run(awaited((0.0, fetches), (CATCHING_UP + 1, fetches))) == [True, False]


def test_one_that_failed_is_not_awaited_but_for_another_try_later() -> None:
    fetches = pulse(OLD, AT, Phase.PHASE_CATCHING_UP)
    failed = pulse(OLD, AT + 1, Phase.PHASE_TRAINING)
    said = (0.0, fetches), (1.0, failed), (1.0, fetches), (CATCHING_UP, fetches), (1.0, failed)
    assert run(awaited(*said)) == [True, False, False, True, False]


def test_one_that_is_still_in_the_round_before_is_not_awaited() -> None:
    assert run(awaited((0.0, pulse(OLD, AT, Phase.PHASE_EXCHANGING, round=AT - 1)))) == [False]


def test_a_site_that_holds_a_stage_which_the_run_has_not_is_nobody() -> None:
    roster: Any = Mock()
    mine, odd = pulse(NEW, AT + 1, Phase.PHASE_WAITING), pulse(OLD, AT, Phase.PHASE_EXCHANGING)
    odd.place.stage = 900
    roster.pulses.return_value = roster.participants.return_value = {"a": mine, "b": odd}
    tools: Any = Mock(roster=roster)
    tools.carrier.node = "a"
    routing = Routing(tools, Mock(), Mock(), POSITION, Signal())

    async def main() -> tuple[bool, set[str]]:
        return routing._awaits(), {*routing._here()}

    assert run(main()) == (False, {"a"})


def test_a_site_is_left_out_once_and_twice_as_long_each_time_it_fails_again() -> None:
    suspects, number, spans = Suspects(), 1, list[int]()
    for _ in range(5):
        suspects.add("b", number)
        began = number
        while "b" in suspects.of(number):
            number += 1
        spans.append(number - began)
    assert spans == [1, 2, 4, 8, MOST]


def test_who_takes_part_in_what_counts_is_no_suspect_any_more() -> None:
    suspects = Suspects()
    for number in (1, 2, 3):
        suspects.add("b", number)
    suspects.add("c", 3)
    assert suspects.of(3) == {"b", "c"}
    suspects.clear(["a", "b"])
    assert suspects.of(3) == {"c"}
    suspects.add("b", 9)
    assert suspects.of(9) == {"b"}
    assert suspects.of(10) == set()
