"""How two sites find each other, played without what they then do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rounds.cases import CALM
from simulation.network import Network, SimCarrier
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.base.tasks import Signal
from pier_node.gossip.rendezvous import Met, Rendezvous, meeting_name
from pier_node.gossip.standing import Standing
from pier_node.outer.noloco import groups
from pier_node.rounds.leader import POLL
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import MEET
from pier_proto.v1.peer_pb2 import MeetReply, MeetRequest, Phase, Pulse, Site


class Seeker:
    """A site that only meets."""

    def __init__(self, network: Network, node: str) -> None:
        self.node, self.round, self.phase = node, 0, Phase.PHASE_TRAINING
        self.carrier: SimCarrier = network.join(node)
        self.roster = Roster(self.carrier, self.pulse)
        self.news = Signal()
        self.meetings = Rendezvous(
            self.carrier, Standing(self.roster, "", PlainStatements(node)), 1, lambda: self.round, self.news
        )

    def pulse(self) -> Pulse:
        return Pulse(site=Site(node=self.node), phase=self.phase, round=self.round)

    def says(self, round: int) -> Callable[[str], MeetRequest]:
        return lambda node: MeetRequest(round=round, nonce=f"{self.node} to {node}".encode(), digest=b"d" * 32)

    def find(self, round: int, allowance: float = 0.0) -> asyncio.Task[Met | None]:
        return self.carrier.spawn(self.meetings.find(round, self.says(round), allowance))

    def commit(self, round: int) -> None:
        self.round = round
        self.meetings.leave()


def scene(play: Callable[[Network, dict[str, Seeker]], Coroutine[Any, Any, None]], names: str = "ab") -> None:
    async def main() -> None:
        network = Network(1, CALM)
        seekers = {node: Seeker(network, node) for node in names}
        for seeker in seekers.values():
            for node in names:
                seeker.roster.add(Site(node=node))
            seeker.carrier.tasks.update(c.task for c in seeker.roster.contacts.values() if c.task)
        await asyncio.sleep(3.0)
        await play(network, seekers)

    run(main())


def met(found: Met | None) -> str:
    return found.node if found else ""


def test_two_meet_and_know_what_each_said() -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        first = sites["a"].find(1)
        await asyncio.sleep(2.0)
        assert not first.done(), "it waits for its partner"
        second = sites["b"].find(1)
        one, other = await first, await second
        assert one
        assert other
        assert (one.node, one.said.nonce, one.told.nonce) == ("b", b"b to a", b"a to b")
        assert (other.node, other.said.nonce, other.told.nonce) == ("a", b"a to b", b"b to a")

    scene(play)


@pytest.mark.parametrize("names", ["abc", "abcd", "abcde"])
def test_all_meet_as_the_pairing_says(names: str) -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        for round in range(1, 6):
            found = await asyncio.gather(*(site.find(round) for site in sites.values()))
            pairs = {tuple(sorted(filter(None, (node, met(it))))) for node, it in zip(sites, found, strict=True)}
            assert pairs == set(groups(1, round, names))
            for site in sites.values():
                site.commit(round)

    scene(play, names)


def test_a_partner_in_training_is_waited_for_longer_than_a_question_is_held() -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        first = sites["a"].find(1)
        await asyncio.sleep(3 * POLL)
        second = sites["b"].find(1)
        assert (met(await first), met(await second)) == ("b", "a")

    scene(play)


def test_a_partner_that_does_not_come_is_waited_for_as_long_as_the_past_suggests() -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        loop, a, b = asyncio.get_running_loop(), sites["a"], sites["b"]
        for round in range(1, 10):
            first, second = a.find(round), b.find(round)
            await asyncio.gather(first, second)
            a.commit(round)
            b.commit(round)
        began = loop.time()
        assert await a.find(10) is None
        assert 4.9 < loop.time() - began < 5.1, "the floor of the deadline"
        assert met(await a.find(10, allowance=3.0)) == ""
        assert loop.time() - began == pytest.approx(13.0, abs=0.3)
        late = b.find(10)
        assert await late is None, "whoever has given up meets nobody in that round any more"

    scene(play)


def test_a_partner_that_dies_is_not_waited_for() -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        began, found = asyncio.get_running_loop().time(), sites["a"].find(1)
        await asyncio.sleep(1.0)
        network.crash("b")
        assert await found is None
        assert asyncio.get_running_loop().time() - began < 6

    scene(play)


def test_of_three_the_two_that_are_left_meet() -> None:
    """The partner dies while it is waited for: the roster changes, and with it whom one wants."""

    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        for round in range(1, 30):
            if len(groups(1, round, "abc")[0]) == 2 and groups(1, round, "abc")[0] != ("a", "b"):
                break
        first, second = sites["a"].find(round), sites["b"].find(round)
        alone = groups(1, round, "abc")[1][0]
        await asyncio.sleep(0.5)
        network.crash("c")
        found = {"a": await first, "b": await second}
        assert found[alone] is None, "the odd one out goes on at once"
        assert met(found["b" if alone == "a" else "a"]) == "", "and is not there any more when it is wanted"
        for site in (sites["a"], sites["b"]):
            site.commit(round)
        both = await asyncio.gather(sites["a"].find(round + 1), sites["b"].find(round + 1))
        assert [met(it) for it in both] == ["b", "a"]

    scene(play, "abc")


def test_a_round_that_the_partner_has_taken_is_over() -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        sites["b"].commit(4)
        began = asyncio.get_running_loop().time()
        assert await sites["a"].find(3) is None
        assert asyncio.get_running_loop().time() - began < 1
        assert sites["b"].meetings.is_over(4)
        assert not sites["b"].meetings.is_over(5)

    scene(play)


def test_a_partner_that_wants_another_is_asked_a_few_times() -> None:
    """It sees a third site that this one does not."""

    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        a, b = sites["a"], sites["b"]

        async def other(sender: str, request: MeetRequest) -> MeetReply:
            asked.append(sender)
            return MeetReply(verdict=MeetReply.VERDICT_OTHER, other="c")

        asked: list[str] = []
        b.carrier.serve(MEET, other)
        began = asyncio.get_running_loop().time()
        assert await a.find(1) is None
        assert 1 < len(asked) < 5
        assert asyncio.get_running_loop().time() - began < 5

    scene(play)


def test_questions_are_answered_by_what_is_known() -> None:
    async def play(network: Network, sites: dict[str, Seeker]) -> None:
        a, b = sites["a"], sites["b"]

        async def ask(round: int, nonce: bytes = b"n") -> MeetReply:
            request = MeetRequest(round=round, nonce=nonce, digest=b"d" * 32)
            return await b.carrier.call("a", MEET, request, 2 * POLL)

        assert (await ask(1)).verdict == MeetReply.VERDICT_WAIT, "it trains"
        found = a.find(1)
        await asyncio.sleep(0)
        yes = await ask(1)
        assert (yes.verdict, yes.partner.nonce) == (MeetReply.VERDICT_READY, b"a to b")
        assert met(await found) == "b"
        assert (await ask(1)) == yes, "the answer may have got lost"
        assert (await ask(1, b"restarted")).verdict == MeetReply.VERDICT_OVER
        a.commit(1)
        assert (await ask(1)).verdict == MeetReply.VERDICT_OVER

    scene(play)


def test_the_name_of_a_meeting() -> None:
    name = meeting_name(3, ("a", b"1"), ("b", b"2"))
    assert len(name) == 32
    assert name == meeting_name(3, ("b", b"2"), ("a", b"1"))
    others = [meeting_name(4, ("a", b"1"), ("b", b"2")), meeting_name(3, ("a", b"2"), ("b", b"1"))]
    assert name not in others
