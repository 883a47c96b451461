"""A vote counts once: whoever hands votes to whom, two groups that both carry a quorum share a member."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.rounds.commitments import Commitments
from pier_node.rounds.quorum import Base, carried, has_quorum, needed, received
from pier_proto.v1.peer_pb2 import Handover

NODES = "abcd"
BASE = Base(NODES)
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
            last = max((it for it in shown if it.node == giver), key=lambda it: it.number)
            assert received(shown, last) == before, "what was just given is proven to the heir, and nothing else"
            self.bound[heir] = self.bound[heir].taking(4, before)
            self.shown[heir] += shown

    def handovers(self, node: str) -> list[Handover]:
        signed = [
            Handover(node=node, heir=it.heir, round=4, base=STATE, votes=sorted(it.votes), number=number)
            for number, it in enumerate(self.bound[node].given, 1)
        ]
        return [*self.shown[node], *signed]

    def carried(self, group: Collection[str]) -> frozenset[str]:
        return carried(group, [it for node in group for it in self.handovers(node)])


def groups(names: str) -> list[frozenset[str]]:
    return [frozenset(it) for it in chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1))]


pairs = st.permutations(NODES).map(lambda it: (it[0], it[1]))
histories = st.lists(st.tuples(pairs, st.booleans()), max_size=8)


@settings(max_examples=400)
@given(histories)
def test_two_groups_that_both_carry_a_vote_share_a_member(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(NODES)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    able = [group for group in groups(NODES) if has_quorum(stops.carried(group), BASE)]
    assert all(one & other for one, other in combinations(able, 2))
    assert stops.carried(NODES) == set(NODES), "all of them together can always go on"
    for one, other in combinations(groups(NODES), 2):
        assert one & other or not stops.carried(one) & stops.carried(other)


@given(histories)
def test_a_site_alone_carries_what_is_in_its_hand(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(NODES)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    for node in NODES:
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
    """It comes to a for the second time, and leaves with the second of the handovers in which it is."""
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
    stops = Stops(NODES)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    for group in groups(NODES):
        told = [it for node in sorted(group) for it in stops.handovers(node)]
        if has_quorum(carried(group, told), BASE):
            few = needed(group, BASE, told)
            assert has_quorum(carried(group, few), BASE)
            assert len(few) <= len(told)
            assert few == [] or not has_quorum(group, BASE)


def test_handovers_that_a_member_makes_up_are_left_out() -> None:
    idle = [Handover(node="a", heir="bc"[at % 2], round=4, base=STATE, votes=["a"], number=at + 1) for at in range(200)]
    given_on = Handover(node="c", heir="b", round=4, base=STATE, votes=["c"], number=1)
    assert needed("ab", Base("abc"), idle) == []
    assert needed("b", Base("bcd"), [*idle, given_on]) == [given_on]
