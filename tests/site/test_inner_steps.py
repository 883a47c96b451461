from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import config

from pier_node.config.run import OuterSection
from pier_node.outer.schedule import RoundPlan, round_plan
from pier_node.rounds.progress import Progress
from pier_node.site.inner_steps import LEAST, pace, steps_worth_doing
from pier_proto.v1.peer_pb2 import Pulse

RUN = config(inner={"total_steps": 1000}, inner_steps=50)
SOLO, LOCAL = round_plan(RUN, 1), round_plan(RUN, 4)
"""The latter: inner steps 150 to 199."""


def steps(plan: RoundPlan = LOCAL, done: int = 0, speed: float = 100.0, late: bool = False, adapt: bool = True) -> int:
    others = [Pulse(inner_step=170, tokens_per_second=100.0), Pulse(inner_step=120, tokens_per_second=40.0)]
    outer = OuterSection(adaptive_steps=adapt)
    return steps_worth_doing(plan, outer, Progress(inner_step=done, tokens_per_second=speed), others, late)


def test_all_of_them() -> None:
    assert steps(done=150) == steps(done=100) == 50
    assert steps(SOLO, done=50) == 50, "a solo start has no pending update: what was done is not there any more"


def test_what_was_done_and_offered_already_is_not_done_again() -> None:
    assert steps(done=200) == 0
    assert steps(done=180) == 20


def test_a_late_site_does_what_the_furthest_of_the_others_has_left() -> None:
    assert steps(late=True) == 30


@pytest.mark.parametrize(("speed", "expected"), [(100, 50), (90, 50), (50, 25), (25, 12), (1, 6), (0, 50), (400, 50)])
def test_a_slow_site_does_fewer(speed: float, expected: int) -> None:
    assert steps(speed=speed) == expected
    assert steps(speed=speed, adapt=False) == 50


@given(st.floats(0, 1e9), st.lists(st.floats(0, 1e9), max_size=5))
def test_pace_is_bounded(speed: float, others: list[float]) -> None:
    assert LEAST <= pace(speed, [Pulse(tokens_per_second=other) for other in others]) <= 1


def test_pace_alone() -> None:
    assert pace(10.0, []) == 1.0
