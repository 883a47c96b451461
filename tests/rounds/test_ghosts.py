"""Ghosts: sites that a token holder invents. They cost the others next to nothing, and nobody real is kept out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from simulation.network import Network, Weather
from simulation.statements import MemoryProofs
from simulation.virtual_time import run

from pier_node.config.run import RunConfig
from pier_node.identity.node import Identity, Signer
from pier_node.rounds import roster
from pier_node.rounds.double_votes import Convicted
from pier_node.rounds.roster import CONTACTS, HEARSAY, HEARSAY_PER_PEER, Roster, sign_entry
from pier_node.rounds.statements import SignedStatements
from pier_node.site.join import Reception
from pier_node.wire.carrier import BEAT, HELLO, PROTOCOL
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Phase, Pulse, Site

CONFIG = RunConfig.model_validate({"run": {"name": "here", "sites": 3}})


@cache
def signer(number: int) -> Signer:
    """The same key for the same number, so that a test run makes each once."""
    return Signer(Identity(ec.derive_private_key(number + 1, ec.SECP256R1())), CONFIG.hash())


@cache
def ghost(number: int) -> Site:
    """A site with a key of its own that is nowhere; signed as it should be."""
    by = signer(1000 + number)
    return sign_entry(Site(node=by.node, name=f"ghost-{number}", address=by.node), by, version=1)


class Honest:
    """A site as the daemon makes it, as far as it meets others."""

    def __init__(self, network: Network, number: int) -> None:
        by = signer(number)
        self.node, self.carrier = by.node, network.join(by.node)
        self.me = sign_entry(Site(node=by.node, name=f"honest-{number}", address=by.node), by, version=1)
        self.roster = Roster(self.carrier, self.pulse, signer=by)
        convicted = Convicted(Path(), SignedStatements(by), MemoryProofs(), self.roster.bar)
        self.reception = Reception(self.carrier, self.roster, CONFIG, lambda: self.me, convicted)  # type: ignore[arg-type]
        self.carrier.serve(HELLO, self.reception.answer)

    def pulse(self) -> Pulse:
        return Pulse(site=self.me, phase=Phase.PHASE_TRAINING, training_for=1)

    async def gossip(self) -> None:
        """What the daemon does every quarter of a minute."""
        while True:
            await asyncio.sleep(15.0)
            await self.reception.introduce(self.roster.reached_at())


class Liar:
    """A token holder that names ghosts to whoever says hello."""

    def __init__(self, network: Network, number: int, named: list[Site]) -> None:
        by = signer(number)
        self.node, self.carrier, self.named = by.node, network.join(by.node), named
        self.me = sign_entry(Site(node=by.node, name="liar", address=by.node), by, version=1)
        self.carrier.serve(HELLO, self.answer)
        self.carrier.serve(BEAT, self.beat)

    async def beat(self, _sender: str, _pulse: Pulse) -> Pulse:
        return Pulse(site=self.me)

    async def answer(self, _sender: str, _request: HelloRequest) -> HelloReply:
        return HelloReply(protocol=PROTOCOL, run_hash=CONFIG.hash(), site=self.me, roster=[self.me, *self.named])


def among(
    scene: Callable[[Network, list[Honest]], Awaitable[None]], liars: Callable[[Network], list[Liar]] = lambda _: []
) -> None:
    """Three honest sites that know each other, and some liars that all of them have met."""

    async def main() -> None:
        network = Network(1, Weather(delay=0.01, jitter=0.0))
        honest = [Honest(network, number) for number in range(3)]
        addresses = [*(site.node for site in honest), *(liar.node for liar in liars(network))]
        await asyncio.gather(*(site.reception.introduce(addresses) for site in honest))
        gossip = [asyncio.create_task(site.gossip()) for site in honest]
        await scene(network, honest)
        for task in gossip:
            task.cancel()
        for site in honest:
            await site.roster.stop()

    run(main())


def dialled(network: Network, nodes: set[str]) -> int:
    return sum(count for node, count in network.hops.items() if node in nodes)


@pytest.mark.parametrize("count", [400, 1000])
@pytest.mark.parametrize("signed", [False, True])
def test_ghosts_are_hardly_dialled_and_the_beat_of_real_peers_is_as_it_was(count: int, signed: bool) -> None:
    named = [ghost(number) for number in range(count)]
    if not signed:
        named = [Site(node=site.node, name=site.name, address=site.address) for site in named]
    ghosts = {site.node for site in named}

    async def scene(network: Network, honest: list[Honest]) -> None:
        await asyncio.sleep(60)
        before, beats = dialled(network, ghosts), network.hops[honest[0].node]
        await asyncio.sleep(60)
        dials = (dialled(network, ghosts) - before) / 60 / len(honest)
        assert dials <= (8 if signed else 0), f"{dials:.0f} dials of ghosts a second at each site"
        assert (network.hops[honest[0].node] - beats) / 60 == pytest.approx(5, abs=0.5), "two ask, and three answer"
        assert all(set(site.roster.participants()) == {other.node for other in honest} for site in honest)

    among(scene, lambda network: [Liar(network, 10, named)])


def test_a_peer_tells_of_few_and_all_together_of_few_more() -> None:
    def liars(network: Network) -> list[Liar]:
        return [
            Liar(network, 10 + it, [ghost(number) for number in range(100 * it, 100 * it + 100)]) for it in range(6)
        ]

    async def scene(_network: Network, honest: list[Honest]) -> None:
        for site in honest:
            hearsay = [contact.told_by for contact in site.roster.contacts.values() if contact.told_by]
            assert len(hearsay) == HEARSAY
            assert max(map(hearsay.count, hearsay)) == HEARSAY_PER_PEER
            assert len(site.roster.known()) == 2 + 6, "and they are neither passed on nor noted"

    among(scene, liars)


def test_who_is_never_reached_is_forgotten_and_who_took_part_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "FORGOTTEN", 300.0)
    monkeypatch.setattr(roster, "PARTICIPANT_FORGOTTEN", 900.0)

    async def scene(network: Network, honest: list[Honest]) -> None:
        gone, here = honest[2], honest[0].roster
        await gone.roster.stop()
        network.crash(gone.node)
        await asyncio.sleep(500)
        assert gone.node in here.contacts, "it took part"
        heard = [contact.heard_at for contact in here.contacts.values() if contact.told_by]
        assert len(heard) == 16
        assert min(heard) > 200, "forgotten, and told of again"
        await asyncio.sleep(600)
        assert gone.node not in here.contacts
        assert {it.node for it in honest[:2]} == set(here.participants())

    among(scene, lambda network: [Liar(network, 10, [ghost(number) for number in range(16)])])


def test_a_member_of_the_last_round_is_never_forgotten_and_asked_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "PARTICIPANT_FORGOTTEN", 300.0)

    async def scene(network: Network, honest: list[Honest]) -> None:
        gone, here = honest[2], honest[0].roster
        here.keep([gone.node])
        await gone.roster.stop()
        network.crash(gone.node)
        await asyncio.sleep(60)
        before = network.hops[gone.node]
        await asyncio.sleep(60)
        assert network.hops[gone.node] - before >= 60
        await asyncio.sleep(600)
        assert gone.me in here.known()
        assert gone.me not in honest[1].roster.known(), "it has that from hearsay again"

    among(scene)


def test_a_newer_entry_replaces_an_older_one_and_nothing_else_does() -> None:
    async def scene(_network: Network, honest: list[Honest]) -> None:
        here, b, c = honest[0].roster, honest[1], honest[2]
        moved = sign_entry(Site(node=b.node, address="moved", name="b"), signer(1), version=5)
        assert here.hear([moved], c.node) == [moved]
        for site, by in ((b.me, 1), (Site(node=b.node, address="stolen", version=9), None), (moved, 2)):
            entry = Site()
            entry.CopyFrom(site)
            if by == 2:
                sign_entry(entry, signer(2), version=9)
            assert here.hear([entry], c.node) == []
            here.add(entry)
            assert here.contacts[b.node].site == moved

    among(scene)


def test_a_site_that_was_started_again_is_known_by_its_newer_entry() -> None:
    async def scene(_network: Network, honest: list[Honest]) -> None:
        here, b, began = honest[0].roster, honest[1], asyncio.get_running_loop().time()
        await asyncio.sleep(5)
        assert here.stayed(b.node, began)
        b.me = sign_entry(Site(node=b.node, address=b.node), signer(1), version=2)
        await asyncio.sleep(5)
        assert here.alive(b.node)
        assert not here.stayed(b.node, began)
        assert here.stayed(b.node, asyncio.get_running_loop().time())

    among(scene)


def test_a_site_that_others_tell_of_takes_part_once_it_has_answered() -> None:
    async def scene(network: Network, honest: list[Honest]) -> None:
        newcomer = Honest(network, 5)
        assert honest[0].roster.hear([newcomer.me], honest[1].node) == [newcomer.me]
        assert newcomer.me not in honest[0].roster.known()
        await asyncio.sleep(1)
        assert newcomer.me in honest[0].roster.known()
        assert newcomer.node in honest[0].roster.participants()
        await newcomer.roster.stop()

    among(scene)


def test_who_is_known_to_more_than_a_run_may_have_makes_room_for_others() -> None:
    async def scene(network: Network, honest: list[Honest]) -> None:
        here = honest[0].roster
        here.keep([honest[1].node])
        for number in range(CONTACTS):
            here.add(ghost(number))
        assert len(here.contacts) == CONTACTS
        newcomer = Honest(network, 5)
        here.add(newcomer.me)
        assert newcomer.node in here.contacts
        assert {it.node for it in honest[1:]} <= here.contacts.keys()
        await asyncio.sleep(180)
        before = network.hops.total()
        await asyncio.sleep(60)
        assert (network.hops.total() - before) / 60 < 30, "eight ghosts a second, and the beats of five who are real"
        await newcomer.roster.stop()

    among(scene)
