"""A statement holds for whoever made it, for its run and for its purpose; and never when a byte of it was changed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds.cases import ballot
from simulation.keys import IDENTITIES, NODES

from pier_node.identity.node import Signer
from pier_node.rounds.commitments import Commitments
from pier_node.rounds.quorum import has_quorum
from pier_node.rounds.statements import SignedStatements, carried, needed, received
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Ready, Signed, Vote

RUN, OTHER_RUN = bytes(32), bytes(31) + b"1"
ALICE, BOB = NODES["a1"], NODES["b2"]


def statements(name: str, run: bytes = RUN) -> SignedStatements:
    return SignedStatements(Signer(IDENTITIES[name], run))


READY = Ready(node=ALICE, round=5, nonce=b"n", votes=[ALICE], base=bytes(32))
VOTE = Vote(node=ALICE, round=5, ballot=ballot(1, ALICE), digest=bytes(32), plan=bytes(32))
HANDOVER = Handover(node=ALICE, heir=BOB, round=4, base=bytes(32), votes=[ALICE])


def test_everybody_reads_what_a_node_has_signed() -> None:
    alice, bob = statements("a1"), statements("b2")
    assert bob.read(Ready, alice.seal(READY)) == READY
    assert bob.read(Vote, alice.seal(VOTE)) == VOTE
    assert bob.read(Handover, alice.seal(HANDOVER)) == HANDOVER


def _forged(signed: Signed) -> None:
    signed.statement = Vote(
        node=ALICE, round=6, ballot=VOTE.ballot, digest=bytes(32), plan=bytes(32)
    ).SerializeToString()


def _extended(signed: Signed) -> None:
    signed.statement += Vote(round=6).SerializeToString()


def _signature(signed: Signed) -> None:
    signed.signature = signed.signature[:-1] + bytes([signed.signature[-1] ^ 1])


def _unsigned(signed: Signed) -> None:
    signed.signature = b""


def _other_key(signed: Signed) -> None:
    signed.public = statements("b2").seal(VOTE).public


def _other_node(signed: Signed) -> None:
    signed.node = BOB


@pytest.mark.parametrize("forge", [_forged, _extended, _signature, _unsigned, _other_key, _other_node])
def test_what_was_changed_is_refused(forge: Callable[[Signed], None]) -> None:
    signed = statements("a1").seal(VOTE)
    forge(signed)
    with pytest.raises(BadMessage, match="has not signed for this run"):
        statements("b2").read(Vote, signed)


def test_what_was_signed_for_another_run_is_refused() -> None:
    with pytest.raises(BadMessage, match="has not signed for this run"):
        statements("b2").read(Vote, statements("a1", OTHER_RUN).seal(VOTE))


def test_what_was_signed_for_another_purpose_is_refused() -> None:
    """A handover and a vote of the same bytes must not stand for each other."""
    with pytest.raises(BadMessage, match=f"a Handover that {ALICE} has not signed"):
        statements("b2").read(Handover, statements("a1").seal(READY))
    with pytest.raises(BadMessage, match=f"a Ready that {ALICE} has not signed"):
        statements("b2").read(Ready, statements("a1").seal(VOTE))


def test_nobody_speaks_in_anothers_name() -> None:
    """Its own signature is good, but what it says is said by somebody else."""
    with pytest.raises(BadMessage, match=f"a Vote of {BOB} in the name of {ALICE}"):
        statements("a1").read(Vote, statements("b2").seal(VOTE))


def test_what_is_out_of_bounds_is_refused_although_it_is_signed() -> None:
    with pytest.raises(BadMessage, match=r"Vote\.digest"):
        statements("b2").read(Vote, statements("a1").seal(Vote(node=ALICE, ballot=VOTE.ballot)))


HEIRS = "abcd"
STATE = b"s" * 32


class Stops:
    """Sites after round 4 that stop and come back (site/shutdown.py, rounds/commitments.py); answers get lost."""

    def __init__(self, members: str) -> None:
        self.bound = {node: Commitments.fresh(4, node) for node in members}
        self.shown: dict[str, list[Handover]] = {node: [] for node in members}

    def give(self, giver: str, heir: str, arrives: bool) -> None:
        before = self.bound[giver].votes
        if not before:
            return
        self.bound[giver] = self.bound[giver].giving(heir)
        if arrives:
            shown = self.handovers(giver)
            gift = max((it for it in shown if it.node == giver), key=lambda it: it.number)
            assert received(shown, gift) == before, "what was just given is proven to the heir, and nothing else"
            self.bound[heir] = self.bound[heir].taking(4, before)
            self.shown[heir] += shown

    def handovers(self, node: str) -> list[Handover]:
        signed = [
            Handover(node=node, heir=it.heir, round=4, base=STATE, votes=sorted(it.votes), number=number)
            for number, it in enumerate(self.bound[node].gifts, 1)
        ]
        return [*self.shown[node], *signed]

    def carried(self, group: Collection[str]) -> frozenset[str]:
        return carried(group, [it for node in group for it in self.handovers(node)])


def groups(names: str) -> list[frozenset[str]]:
    return [frozenset(it) for it in chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1))]


pairs = st.permutations(HEIRS).map(lambda it: (it[0], it[1]))
histories = st.lists(st.tuples(pairs, st.booleans()), max_size=8)


@settings(max_examples=400)
@given(histories)
def test_two_groups_that_both_carry_a_vote_share_a_member(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(HEIRS)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    able = [group for group in groups(HEIRS) if has_quorum(stops.carried(group), HEIRS)]
    assert all(one & other for one, other in combinations(able, 2))
    assert stops.carried(HEIRS) == set(HEIRS), "all of them together can always go on"
    for one, other in combinations(groups(HEIRS), 2):
        assert one & other or not stops.carried(one) & stops.carried(other)


@given(histories)
def test_a_site_alone_carries_what_is_in_its_hand(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(HEIRS)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    for node in HEIRS:
        assert stops.carried(node) >= stops.bound[node].votes


def handover(giver: str, heir: str, votes: str = "", number: int = 1) -> Handover:
    return Handover(node=giver, heir=heir, round=4, base=STATE, votes=votes or giver, number=number)


def test_a_vote_whose_handover_got_lost_counts_where_giver_and_heir_meet() -> None:
    assert carried("ab", [handover("a", "b")]) == {"a", "b"}
    assert carried("ac", [handover("a", "b")]) == {"c"}
    assert carried("bc", []) == {"b", "c"}


def test_a_vote_that_was_given_on_counts_with_the_last_heir() -> None:
    told = [handover("a", "b"), handover("b", "c", "ab")]
    assert carried("c", told) == {"a", "b", "c"}
    assert carried("ab", told) == set(), "c may have both"


def test_a_vote_that_came_back_can_be_given_again() -> None:
    """It comes to a for the second time, and leaves with the second of the gifts in which it is."""
    circle = [handover("a", "b"), handover("b", "a", "ab")]
    assert carried("a", circle) == {"a", "b"}
    assert carried("c", [*circle, handover("a", "c", "ab", number=2)]) == {"a", "b", "c"}


def test_nobody_gives_what_it_cannot_have_had() -> None:
    stolen = handover("c", "b", "a")
    assert carried("b", [stolen]) == {"b"}
    assert received([stolen], stolen) == set()
    assert carried("a", [stolen]) == {"a"}


@settings(max_examples=400)
@given(histories)
def test_a_few_handovers_show_a_quorum_as_well_as_all_of_them(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(HEIRS)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    for group in groups(HEIRS):
        told = [it for node in sorted(group) for it in stops.handovers(node)]
        if has_quorum(carried(group, told), HEIRS):
            few = needed(group, HEIRS, told)
            assert has_quorum(carried(group, few), HEIRS)
            assert len(few) <= len(told)
            assert few == [] or not has_quorum(group, HEIRS)


def test_handovers_that_a_member_makes_up_are_left_out() -> None:
    idle = [Handover(node="a", heir="bc"[at % 2], round=4, base=STATE, votes=["a"], number=at + 1) for at in range(200)]
    given_on = Handover(node="c", heir="b", round=4, base=STATE, votes=["c"], number=1)
    assert needed("ab", "abc", idle) == []
    assert needed("b", "bcd", [*idle, given_on]) == [given_on]
