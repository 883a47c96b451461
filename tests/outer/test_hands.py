"""A vote counts once: whoever hands votes to whom, two groups that both carry a quorum share a member."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pier.v1.peer_pb2 import Handover
from pier_node.outer.commitments import Commitments
from pier_node.outer.hands import Hand, carried, proven_hand
from pier_node.outer.quorum import has_quorum

NODES = "abcd"
STATE = b"s" * 32


class Stops:
    """Sites after round 4 that stop and come back, as leave.py and promises.py do it, with answers that get lost."""

    def __init__(self, members: str) -> None:
        self.bound = {node: Commitments.fresh(4, node) for node in members}
        self.shown: dict[str, list[Handover]] = {node: [] for node in members}

    def give(self, giver: str, heir: str, arrives: bool) -> None:
        if not self.bound[giver].votes:
            return
        before = self.bound[giver].votes
        self.bound[giver] = self.bound[giver].giving(heir)
        if arrives:
            shown = self.handovers(giver)
            told = proven_hand(giver, (), shown).given
            votes = frozenset(vote for vote, to in told.items() if to == heir)
            assert votes >= before, "what was just given is proven to the heir"
            self.bound[heir] = self.bound[heir].taking(4, votes)
            self.shown[heir] += shown

    def handovers(self, node: str) -> list[Handover]:
        ours: dict[str, list[str]] = {}
        for vote, heir in sorted(self.bound[node].given):
            ours.setdefault(heir, []).append(vote)
        signed = [Handover(node=node, heir=heir, round=4, base=STATE, votes=votes) for heir, votes in ours.items()]
        return [*self.shown[node], *signed]

    def hand(self, node: str) -> Hand:
        return proven_hand(node, self.bound[node].votes, self.handovers(node))


def groups(names: str) -> list[frozenset[str]]:
    return [frozenset(it) for it in chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1))]


pairs = st.permutations(NODES).map(lambda it: (it[0], it[1]))
histories = st.lists(st.tuples(pairs, st.booleans()), max_size=8)


@settings(max_examples=400)
@given(histories)
def test_two_groups_that_both_carry_a_quorum_share_a_member(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(NODES)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    hands = {node: stops.hand(node) for node in NODES}
    able = [group for group in groups(NODES) if has_quorum(carried({node: hands[node] for node in group}), NODES)]
    assert all(one & other for one, other in combinations(able, 2))
    assert frozenset(NODES) in able, "all of them together can always go on"


@given(histories)
def test_no_vote_is_in_two_hands(history: list[tuple[tuple[str, str], bool]]) -> None:
    stops = Stops(NODES)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    held = [vote for node in NODES for vote in stops.hand(node).votes]
    assert len(held) == len(set(held))


@given(histories)
def test_a_restart_proves_the_same_hand(history: list[tuple[tuple[str, str], bool]]) -> None:
    """What a site holds is what it can show: none of it is lost when the handovers are read again."""
    stops = Stops(NODES)
    for (giver, heir), arrives in history:
        stops.give(giver, heir, arrives)
    for node in NODES:
        assert stops.hand(node).votes == stops.bound[node].votes


def handover(giver: str, heir: str, votes: str = "") -> Handover:
    return Handover(node=giver, heir=heir, round=4, base=STATE, votes=votes or giver)


def test_a_vote_in_limbo_counts_where_giver_and_heir_meet() -> None:
    lost = {"a": Hand(frozenset(), {"a": "b"}), "b": Hand(frozenset("b")), "c": Hand(frozenset("c"))}
    assert carried(lost) == {"a", "b", "c"}
    assert carried({node: lost[node] for node in "bc"}) == {"b", "c"}
    assert carried({node: lost[node] for node in "ac"}) == {"c"}


def test_a_vote_that_was_given_on_counts_with_the_last_heir_alone() -> None:
    passed = {
        "a": Hand(frozenset(), {"a": "b"}),
        "b": Hand(frozenset(), {"a": "c", "b": "c"}),
        "c": Hand(frozenset("c")),
    }
    assert carried(passed) == {"a", "b", "c"}
    assert carried({node: passed[node] for node in "ab"}) == set(), "c may have both"


def test_votes_that_were_given_in_a_circle_count_for_nobody() -> None:
    circle = {"a": Hand(frozenset(), {"a": "b"}), "b": Hand(frozenset(), {"a": "a"})}
    assert carried(circle) == set()


def test_a_site_holds_what_it_can_show_alone() -> None:
    assert proven_hand("b", "abc", []).votes == set("b")
    assert proven_hand("b", "abc", [handover("a", "b")]).votes == set("ab")
    assert proven_hand("b", "ab", [handover("a", "c")]).votes == set("b"), "given to another"
    assert proven_hand("b", "ab", [handover("c", "b", "a")]).votes == set("b"), "c never had it"
    assert proven_hand("b", "ab", [handover("a", "c"), handover("c", "b", "ac")]).votes == set("ab"), "by way of c"


def test_nobody_gives_what_it_cannot_have_had() -> None:
    assert proven_hand("b", "", [handover("b", "c", "ab")]).given == {"b": "c"}
    assert proven_hand("b", "", [handover("a", "b"), handover("b", "c", "ab")]).given == {"a": "c", "b": "c"}
    assert proven_hand("b", "b", [handover("b", "c")]).given == {}, "it says that it has it back"
