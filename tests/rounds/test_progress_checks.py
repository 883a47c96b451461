"""Who says that it is ahead is asked for the proof; nobody follows it before, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rounds.cases import CALM, Member, Puppet, acquainted, link, outer_state, with_puppet
from simulation.network import Network
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.base.errors import PierError
from pier_node.rounds.proofs import FIRST_PAUSE, LAST_PAUSE, LOOK, TIMEOUT, Trust, Trusted
from pier_node.wire.carrier import DESCRIBE, BadMessage
from pier_proto.v1.peer_pb2 import Link, Manifest

TRUE, BASE = b"t" * 32, b"b" * 32


def told(play: Callable[[Puppet, Member], Coroutine[Any, Any, None]]) -> None:
    """The member b at round 3, of a, b and c; a says that it is at round 9."""

    async def main() -> None:
        puppet, member = await with_puppet(Network(1, CALM))
        member.rounds.state = outer_state("abc", round=3)
        puppet.round, puppet.digest = 9, TRUE
        member.carrier.spawn(member.rounds.claims.run())
        await play(puppet, member)

    run(main())


def test_a_boast_is_not_followed_and_is_doubted_ever_longer() -> None:
    async def play(puppet: Puppet, member: Member) -> None:
        await asyncio.sleep(5000)
        assert member.rounds.sources() == []
        pauses = [later - before for before, later in zip(puppet.asked, puppet.asked[1:])]
        wanted = [min(FIRST_PAUSE * 2**number, LAST_PAUSE) for number in range(len(pauses))]
        assert len(pauses) > 10
        assert all(asked <= pause <= asked + LOOK + 1 for asked, pause in zip(wanted, pauses, strict=True)), pauses

    told(play)


def test_a_true_claim_is_followed() -> None:
    async def play(puppet: Puppet, member: Member) -> None:
        puppet.proof = [link(7, BASE, b"7" * 32, "ac"), link(9, BASE, TRUE, "acd")]
        await member.roster.changed.until(lambda: member.rounds.sources() == ["a"])
        trust = member.rounds.claims.proof_of("a")
        assert trust
        assert trust.state == Trusted(9, TRUE, tuple("acd"))
        assert trust.links == puppet.proof

    told(play)


def test_who_could_not_prove_it_at_first_is_believed_once_it_can() -> None:
    async def play(puppet: Puppet, member: Member) -> None:
        await asyncio.sleep(30)
        assert len(puppet.asked) > 1
        puppet.proof = [link(9, BASE, TRUE, "ab")]
        await member.roster.changed.until(lambda: member.rounds.sources() == ["a"])

    told(play)


def test_what_was_proved_is_no_news_any_more_when_this_site_has_it() -> None:
    async def play(puppet: Puppet, member: Member) -> None:
        puppet.proof = [link(9, BASE, TRUE, "ab")]
        await member.roster.changed.until(lambda: member.rounds.sources() == ["a"])
        member.rounds.state = outer_state("ab", round=9)
        assert member.rounds.sources() == []
        assert member.rounds.claims.proof_of("a") is None

    told(play)


def test_nobody_waits_for_who_says_it_and_then_is_silent() -> None:
    """b and c commit a round meanwhile."""

    async def main() -> None:
        network = Network(1, CALM)
        puppet, members = Puppet(network, "z", round=9), {n: Member(network, n, outer_state("bc")) for n in "bc"}

        async def silent(sender: str, request: object) -> Manifest:
            puppet.asked.append(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
            raise AssertionError

        puppet.carrier.serve(DESCRIBE, silent)
        for member in members.values():
            member.meet(*"bcz")
            member.carrier.spawn(member.rounds.run())
        await acquainted({**members, "z": members["b"]})
        await members["b"].roster.changed.until(lambda: bool(puppet.asked))
        async with asyncio.timeout(TIMEOUT / 2):
            states = await asyncio.gather(*(member.contribute(1.0) for member in members.values()))
        assert {state.members for state in states} == {("b", "c")}

    run(main())


def test_a_long_proof_comes_in_parts() -> None:
    async def play(puppet: Puppet, member: Member) -> None:
        links = [
            link(4, member.rounds.base, b"4" * 32, "ab"),
            link(5, b"4" * 32, b"5" * 32, "a"),
            link(9, BASE, TRUE, "ad"),
        ]
        asked: list[int] = []

        async def page(sender: str, request: Any) -> Manifest:
            asked.append(request.trusted)
            proof = [it for it in links if it.round >= request.trusted][:1]
            return Manifest(round=9, digest=TRUE, members=["a", "d"], proof=proof)

        puppet.carrier.serve(DESCRIBE, page)
        await member.roster.changed.until(lambda: member.rounds.sources() == ["a"])
        assert asked == [4, 5, 6], "one more than the round that is trusted"

    told(play)


def trust() -> Trust:
    return Trust(Trusted(3, BASE, ("a", "b")), PlainStatements("b"))


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(round=9, digest=TRUE),
        Manifest(round=9, digest=TRUE, proof=[link(8, BASE, TRUE, "ab")]),
        Manifest(round=9, digest=BASE, proof=[link(9, BASE, TRUE, "ab")]),
        Manifest(round=5000, digest=TRUE, proof=[link(9, BASE, TRUE, "ab")]),
        Manifest(round=9, digest=TRUE, proof=[link(9, BASE, TRUE, "z")]),
    ],
    ids=["nothing", "an earlier round", "another state", "a later round", "votes of others"],
)
def test_a_state_without_its_proof_is_refused(manifest: Manifest) -> None:
    with pytest.raises(BadMessage, match="proof"):
        trust().admit(manifest)


def test_a_state_with_its_proof_is_admitted_whatever_is_known_of_it_already() -> None:
    believed = trust()
    links = [link(7, BASE, b"7" * 32, "ab"), link(9, BASE, TRUE, "abc")]
    believed.admit(Manifest(round=9, digest=TRUE, proof=links))
    believed.admit(Manifest(round=9, digest=TRUE, proof=links))
    assert believed.links == links


def given(fingerprint: str) -> Trust:
    return Trust.of_fingerprint(fingerprint, PlainStatements("b"))


def test_a_state_whose_fingerprint_was_given_is_believed_and_what_follows_is_proved() -> None:
    """The members of that state are strangers; those who come after it need their votes."""
    links = [link(7, BASE, b"7" * 32, "xy"), link(9, BASE, TRUE, "xyz")]
    fingerprint = Trusted(7, b"7" * 32, ("x", "y")).fingerprint
    believed = given(fingerprint)
    assert believed.state.round == 6, "the link of the state itself is asked for"
    believed.admit(Manifest(round=9, digest=TRUE, proof=links))
    assert believed.state == Trusted(9, TRUE, tuple("xyz"))
    assert believed.links == links
    with pytest.raises(BadMessage, match="without a majority"):
        given(fingerprint).admit(Manifest(round=9, digest=TRUE, proof=[links[0], link(9, BASE, TRUE, "q")]))


@pytest.mark.parametrize("other", [link(7, BASE, b"6" * 32, "xy"), link(7, BASE, b"7" * 32, "xq")])
def test_another_state_than_the_one_of_the_fingerprint_is_refused(other: Link) -> None:
    fingerprint = Trusted(7, b"7" * 32, ("x", "y")).fingerprint
    with pytest.raises(BadMessage, match="not the one that this site was told to trust"):
        given(fingerprint).admit(Manifest(round=7, digest=other.digest, proof=[other]))


@pytest.mark.parametrize("text", ["12", "12-abc", "x-" + "a" * 40, "-1-" + "a" * 40, "12-" + "G" * 40])
def test_what_is_no_fingerprint_is_an_error(text: str) -> None:
    with pytest.raises(PierError, match="not the fingerprint of a state"):
        given(text)
