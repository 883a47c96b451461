"""Whom the planner waits for: a site that fetches its stage; and whom it leaves out, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import pytest
from simulation.virtual_time import run

from pier_node.base.tasks import Signal
from pier_node.pipeline.plan_delivery import CATCHING_UP, FORGOTTEN, MOST, NEWCOMER_TIMEOUT, VIEWS, Routing, Suspects
from pier_node.pipeline.vote_state import Turn, VoteState
from pier_node.wire.carrier import DROP, BadMessage, PeerLost
from pier_proto.v1.peer_pb2 import Ack, Dropped, IterationPlan, Path, Phase, Place, Pulse

AT, OLD, NEW = 7, 6 << 24, 7 << 24
POSITION: Any = Mock(coming=AT + 1, voted=VoteState(7, 3.0, (NEW, NEW)))
POSITION.config.pipeline.stages = 2


def pulse(version: int, training_for: int, phase: Phase.ValueType, round: int = AT) -> Pulse:
    return Pulse(place=Place(stage=1, version=version), training_for=training_for, phase=phase, round=round)


async def awaited(*said: tuple[float, Pulse | None]) -> list[bool]:
    """Whether a site is waited for that says these, each after so many seconds; None: it is away."""
    roster: Any = Mock()
    routing = Routing(Mock(roster=roster), Mock(), Mock(), POSITION, Signal())
    answers = []
    for seconds, each in said:
        await asyncio.sleep(seconds)
        roster.pulses.return_value = {"b": each} if each else {}
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


def test_one_that_went_and_came_back_later_is_awaited_as_long_as_at_first() -> None:
    fetches = pulse(OLD, AT, Phase.PHASE_CATCHING_UP)
    said = (0.0, fetches), (FORGOTTEN, None), (1.0, fetches), (CATCHING_UP - 1, fetches), (1.0, fetches)
    assert run(awaited(*said)) == [True, False, True, True, False]


def test_one_that_comes_and_goes_is_awaited_for_half_of_the_time_at_most() -> None:
    fetches = pulse(OLD, AT, Phase.PHASE_CATCHING_UP)
    beat = (CATCHING_UP - 1, fetches), (0.5, None), (0.5, fetches)
    answers = run(awaited((0.0, fetches), *(3 * beat), (1.0, fetches)))
    assert answers == [True, *(True, False, False), *3 * (False,), *(False, False, True), True]


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


class Here:
    """The delivery of plans at one site, b, which waits for the plan of the next round."""

    def __init__(self, *sites: str, electors: str = "abc") -> None:
        self.position: Any = Mock(coming=AT + 1, voted=VoteState(7, 3.0, (NEW, NEW), electors=frozenset(electors)))
        self.position.config.pipeline.stages, self.position.turn = 2, Turn.TOGETHER
        self.roster, self.news, stage_state = Mock(changed=Signal()), Signal(), Mock(stage=1, version=NEW)
        self.see(*sites)
        tools: Any = Mock(roster=self.roster)
        self.carrier = tools.carrier
        self.carrier.node, self.planner = "b", Mock(seed=1)
        self.routing = Routing(tools, self.planner, stage_state, self.position, self.news)

    def see(self, *sites: str, **said: Pulse) -> None:
        """These sites are live."""
        pulses = {node: pulse(NEW, AT + 1, Phase.PHASE_TRAINING) for node in sites} | said
        self.roster.participants.return_value = self.roster.pulses.return_value = pulses
        self.roster.changed.notify()

    async def told(self, sender: str, step: int = 7) -> str:
        """Why the plan of a site is refused; "" if it is taken."""
        try:
            await self.routing._take(sender, plan_of(sender, step))
        except BadMessage as bad:
            return str(bad)
        return ""


def plan_of(sender: str, step: int = 7) -> IterationPlan:
    """A plan that differs from those of other senders."""
    return IterationPlan(
        round=AT + 1, step=step, nodes=["a", "b", sender], stages=[0, 1, 0], paths=[Path(sites=[0, 1])], waves=[1]
    )


async def waiting(here: Here, *works: Coroutine[Any, Any, Any]) -> list[Any]:
    """What these result in, while the site waits for a plan; the last result is the plan of which site it took."""
    plan = asyncio.create_task(here.routing.plan(1, lambda: False))
    found = await asyncio.gather(*works)
    taken = await plan
    return [*found, taken and taken.message.nodes[-1]]


async def after(seconds: float, do: Callable[[], object]) -> None:
    await asyncio.sleep(seconds)
    do()


def test_only_the_plan_of_the_planner_is_taken() -> None:
    here = Here("a", "b", "c", "x")
    refused = "round 8 is planned by a, as far as this site can see"

    async def main() -> list[Any]:
        return await waiting(here, here.told("c"), here.told("x"), after(VIEWS + 1, lambda: None), late())

    async def late() -> str:
        await asyncio.sleep(VIEWS + 2)
        return await here.told("a")

    assert run(main()) == [refused, refused, None, "", "a"]


def test_a_site_that_has_just_come_is_not_the_planner_whatever_its_id() -> None:
    here = Here("0", "a", "b")
    assert run(waiting(here, here.told("0"), here.told("a"))) == [
        "this site has a plan for that round already, or has done without one",
        "",
        "a",
    ]


def test_without_electors_the_first_site_plans() -> None:
    here = Here("0", "b", electors="acd")
    assert run(waiting(here, here.told("0"))) == ["", "0"]


def test_the_plan_of_another_is_taken_once_the_planner_is_seen_to_be_gone() -> None:
    here = Here("a", "b", "c", electors="ac")
    assert run(waiting(here, here.told("c"), after(12.0, lambda: here.see("b", "c")))) == ["", None, "c"]


def test_the_own_plan_gives_way_to_that_of_the_planner() -> None:
    """This site thought that it plans, because it did not see the planner."""
    here, sent, dropped = Here("b", "c"), asyncio.Event(), list[tuple[str, Dropped]]()

    async def call(node: str, method: Any, message: Any, _timeout: float) -> Ack:
        if method is DROP:
            dropped.append((node, message))
        else:
            sent.set()
            await asyncio.sleep(20.0)
        return Ack()

    async def planned(*_: Any) -> IterationPlan:
        return plan_of("c")

    async def of_a() -> str:
        await sent.wait()
        here.see("a", "b", "c")
        return await here.told("a")

    here.carrier.call, here.planner.plan = call, planned
    assert run(waiting(here, of_a())) == ["", "a"]
    assert {node for node, _ in dropped} == {"a", "c"}, "they may have taken it"
    assert {it.suspect for _, it in dropped} == {""}
    assert here.routing.suspect == ""


def test_a_plan_is_dropped_as_soon_as_one_of_its_sites_is_seen_to_be_gone() -> None:
    here, dropped = Here("b", "c"), list[tuple[str, float]]()

    async def call(node: str, method: Any, _message: Any, timeout: float) -> Ack:
        if method is DROP:
            dropped.append((node, asyncio.get_running_loop().time()))
        elif node == "c":
            await asyncio.sleep(timeout)
        return Ack()

    async def planned(*_: Any) -> IterationPlan:
        return plan_of("c")

    async def main() -> None:
        task = asyncio.create_task(here.routing.plan(1, lambda: bool(dropped)))
        await after(12.0, lambda: setattr(here.roster.alive, "side_effect", lambda node: node != "c"))
        await task

    here.carrier.call, here.planner.plan = call, planned
    run(main())
    assert [node for node, _ in dropped] == ["a"]
    assert 12.0 <= dropped[0][1] < 14.0
    assert here.routing.suspect == "c"


def test_a_newcomer_that_never_answers_holds_up_the_others_less_and_less_often() -> None:
    here, waits = Here("b", "c", electors="bc"), list[float]()
    here.roster.alive.return_value = True

    async def call(node: str, _method: Any, _message: Any, timeout: float) -> Ack:
        if node == "x":
            await asyncio.sleep(timeout)
            raise PeerLost(node, "no answer")
        return Ack()

    async def planned(number: int, _voted: Any, pulses: dict[str, Pulse], *_: Any) -> IterationPlan:
        message = IterationPlan(round=number, step=7, nodes=["b", "c"], stages=[1, 0], waves=[1])
        message.paths.add(sites=[1, 0])
        message.candidates.extend(pulses.keys() - {"b", "c"})
        message.newcomers.extend([1] * len(message.candidates))
        return message

    async def main() -> None:
        for number in range(AT + 1, AT + 31):
            here.position.coming = number
            ready = pulse(NEW, number, Phase.PHASE_TRAINING, number - 1)
            here.see(b=ready, c=ready, x=Pulse(training_for=number, phase=Phase.PHASE_TRAINING, round=number - 1))
            began = asyncio.get_running_loop().time()
            assert await here.routing.plan(1, lambda: False)
            waits.append(asyncio.get_running_loop().time() - began)

    here.carrier.call, here.planner.plan = call, planned
    run(main())
    assert max(waits) <= NEWCOMER_TIMEOUT + 1
    assert sum(wait > 1 for wait in waits) == 6


@pytest.mark.parametrize("said", [Phase.PHASE_WAITING, Phase.PHASE_EXCHANGING, Phase.PHASE_TRAINING])
def test_what_others_than_electors_say_ends_no_wait_for_a_plan(said: Phase.ValueType) -> None:
    here, stranger = Here("a", "b"), pulse(NEW, AT + 1, said)
    stranger.place.working = True
    here.see("a", "b", x=stranger)

    async def late() -> str:
        await asyncio.sleep(15.0)
        return await here.told("a")

    assert run(waiting(here, late())) == ["", "a"]
    assert not here.routing._others_work(AT + 1)


def test_suspects_are_not_left_out_if_the_rest_cannot_decide() -> None:
    here = Here("a", "b", "c")
    here.routing._suspects.add("c", AT + 1)
    assert {*here.routing._trusted(AT + 1, here.position.voted)} == {"a", "b"}
    here.routing._suspects.add("a", AT + 1)
    assert {*here.routing._trusted(AT + 1, here.position.voted)} == {"a", "b", "c"}


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
