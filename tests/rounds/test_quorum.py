from __future__ import annotations

import random
from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds.cases import ballot, ready, value, voter

from pier_node.rounds.quorum import Adopt, Blocked, Fresh, choose_group, choose_value, has_quorum, next_ballot, order
from pier_proto.v1.peer_pb2 import Ready, Signed, Value

NODES = "abcdefg"
SETS = st.sets(st.sampled_from(NODES))


@pytest.mark.parametrize(
    ("votes", "base", "enough"),
    [
        ("ab", "abc", True),
        ("c", "abc", False),
        ("abc", "abc", True),
        ("ab", "abcd", True),
        ("cd", "abcd", False),
        ("bcd", "abcd", True),
        ("a", "ab", True),
        ("b", "ab", False),
        ("a", "a", True),
        ("bxyz", "abc", False),
        ("", "a", False),
        ("a", "", False),
    ],
)
def test_majority(votes: str, base: str, enough: bool) -> None:
    assert has_quorum(votes, base) is enough


def test_two_groups_that_share_no_vote_never_both_have_a_quorum() -> None:
    for size in range(1, len(NODES) + 1):
        base = NODES[:size]
        for count in range(size + 1):
            for votes in combinations(base, count):
                assert not (has_quorum(votes, base) and has_quorum(set(base) - set(votes), base))


@given(SETS.filter(bool), st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)), max_size=12), st.data())
def test_whoever_hands_votes_to_whom_two_groups_with_a_quorum_share_a_member(
    base: set[str], leaves: list[tuple[str, str]], data: st.DataObject
) -> None:
    hands = {node: {node} for node in NODES}
    for giver, heir in leaves:
        if giver != heir:
            hands[heir] |= hands[giver]
            hands[giver] = set()
    one, other = data.draw(SETS), data.draw(SETS)
    carried = [{vote for node in group for vote in hands[node]} for group in (one, other)]
    if all(has_quorum(votes, base) for votes in carried):
        assert one & other


def test_ballots_are_ordered_by_number_then_leader() -> None:
    assert order(ballot(1, "b")) < order(ballot(2, "a")) < order(ballot(2, "b"))


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_the_next_ballot_is_above_all_that_the_group_has_seen(numbers: list[int]) -> None:
    readies = [ready(node, seen=ballot(number)) for node, number in zip(NODES, numbers, strict=False)]
    found = next_ballot(readies, "k")
    assert found.number > max(numbers)
    assert found.leader == "k"
    assert found == next_ballot(readies[::-1], "k"), "alike in every run of a simulation"


# --- what an attempt must do -------------------------------------------------------------------

X, Y = value("x", "abc"), value("y", "bcd", ballot(2))


def test_nobody_voted() -> None:
    assert choose_value([ready("a"), ready("b")]) == Fresh()


def test_a_vote_is_finished() -> None:
    assert choose_value([voter("a", X), ready("b"), ready("e")]) == Adopt(X, ("a",))


def test_the_newest_vote_counts_not_the_most_frequent() -> None:
    readies = [voter("a", X), voter("b", X), voter("c", Y, 2)]
    assert choose_value(readies) == Adopt(Y, ("c",))


def test_any_holder_of_the_newest_result_may_hand_it_over() -> None:
    readies = [voter("a", X, 1), voter("b", X, 2, holds=False), voter("c", X, 2), voter("d", Y, 1)]
    assert choose_value(readies) == Adopt(X, ("a", "c"))


def test_different_bits_in_one_ballot_cannot_have_been_committed() -> None:
    other = value("z", "abc")
    assert choose_value([voter("a", X), voter("b", other)]) == Fresh()


def test_a_vote_that_another_member_contradicted_is_not_finished() -> None:
    assert choose_value([voter("a", X, refutation=Signed()), ready("e")]) == Fresh(), "b was odd, and is not here"
    assert choose_value([voter("a", X, refutation=Signed()), voter("c", Y, 2)]) == Adopt(Y, ("c",)), "an older vote"


def test_a_result_that_nobody_here_holds_may_be_held_by_who_is_not_here() -> None:
    assert choose_value([voter("a", X, holds=False), voter("b", X, holds=False)]) == Blocked(("c",))


def test_it_is_void_when_one_of_its_members_never_voted() -> None:
    assert choose_value([voter("a", X, holds=False), ready("b")]) == Fresh()


def test_it_is_void_when_all_of_its_members_are_here_and_nobody_holds_it() -> None:
    assert choose_value([voter(node, X, holds=False) for node in "abc"]) == Fresh()


def test_a_stranger_who_did_not_vote_proves_nothing() -> None:
    assert choose_value([voter("a", X, holds=False), ready("e")]) == Blocked(("b", "c"))


def test_withholding_counts_in_the_first_ballot_of_a_result_only() -> None:
    adopted = [voter("a", X, 2, holds=False), ready("b")]
    assert choose_value(adopted) == Blocked(("c",)), "b may have missed the adoption of what a, b and c committed"


def test_a_result_adopted_by_more_is_void_only_when_they_are_here_too() -> None:
    """c, d and e adopt what a, b and c computed; e alone commits it and is cut off; all the others restart."""
    wider = value("x", "abcde")
    readies = [*(voter(node, X, holds=False) for node in "ab"), *(voter(node, wider, 2, holds=False) for node in "cd")]
    assert choose_value(readies) == Blocked(("e",))


@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_no_schedule_of_attempts_decides_two_results(seed: int) -> None:
    """The rules alone: groups form, compute or adopt; some vote, some learn that all did, some restart."""
    attempts = Attempts(random.Random(seed))
    for _ in range(25):
        attempts.once()
        assert len(set(attempts.committed.values())) <= 1


class Attempts:
    """Attempts at one round, and what each site would announce."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.fresh = dice, iter(range(1 << 20))
        nodes = NODES[: dice.randint(2, 6)]
        self.odd = dice.choice([*nodes, ""])
        """Its processor computes other bits."""
        self.base = nodes[: dice.randint(1, len(nodes))]
        self.readies = {node: ready(node) for node in nodes}
        self.committed: dict[str, bytes] = {}

    def once(self) -> None:
        undecided = [node for node in self.readies if node not in self.committed]
        group = [node for node in undecided if self.dice.random() < 0.7]
        if has_quorum(group, self.base):
            self.attempt(group)
        for node in undecided:
            if self.dice.random() < 0.2 and node not in self.committed:
                self.restart(node)

    def attempt(self, group: list[str]) -> None:
        found = choose_value([self.readies[node] for node in group])
        if isinstance(found, Blocked):
            return
        name = next_ballot([self.readies[node] for node in group], self.dice.choice(NODES))
        result = Value(origin=name, digest=b"%d" % next(self.fresh), members=group)
        if isinstance(found, Adopt):
            members = sorted({*found.value.members, *group})
            result = Value(origin=found.value.origin, digest=found.value.digest, members=members)
        likely = self.dice.choice([0.0, 0.5, 1.0])
        takes_part = group if self.dice.random() < 0.8 else [node for node in group if self.dice.random() < 0.7]
        votes = [node for node in group if self.dice.random() < likely and takes_part == group]
        for node in takes_part:
            told = self.readies[node]
            told.seen.CopyFrom(name)
            if node in votes:
                told.voted.CopyFrom(result)
                told.voted_in.CopyFrom(name)
                told.holds = True
                told.ClearField("refutation")
        if isinstance(found, Fresh) and self.odd in votes and len(votes) > 1:
            self.readies[self.odd].voted.digest = b"odd" + result.digest
            for node in votes:
                self.readies[node].ClearField("refutation")
                if self.dice.random() < 0.5:
                    self.readies[node].refutation.SetInParent()
        elif votes == group:
            self.committed.update({node: result.digest for node in group if self.dice.random() < 0.5})

    def restart(self, node: str) -> None:
        """What is in the journal is left: the promise and the vote, not its result."""
        self.readies[node].holds = False
        self.readies[node].ClearField("refutation")


# --- who has voted twice --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "base", "convicted", "enough"),
    [
        ("b", "ab", "a", True),
        ("b", "ab", "", False),
        ("b", "abc", "a", True),
        ("c", "abc", "a", False),
        ("ac", "abc", "a", True),
        ("", "a", "a", False),
        ("bc", "abcd", "a", True),
        ("d", "abcd", "ab", False),
    ],
)
def test_without_who_voted_twice_a_majority_of_the_others_decides(
    votes: str, base: str, convicted: str, enough: bool
) -> None:
    assert has_quorum(votes, base, convicted) is enough


@pytest.mark.parametrize("size", range(1, 7))
def test_two_groups_of_honest_nodes_that_decide_share_one(size: int) -> None:
    """With a node that has voted twice a group that decides without it would decide by the usual rule."""
    base = "abcdefg"[:size]
    for liar in base:
        honest = [node for node in base if node != liar]
        groups = [set(it) for count in range(size) for it in combinations(honest, count)]
        able = [group for group in groups if has_quorum(group, base, liar)]
        assert all(one & other for one in able for other in able)
        assert all(has_quorum(group | {liar}, base) for group in able)


def test_nobody_waits_for_a_result_that_only_who_voted_twice_may_have() -> None:
    lost = voter("a", X)
    lost.holds = False
    assert isinstance(choose_value([lost]), Blocked)
    assert choose_value([lost], convicted="bcd") == Fresh()


# --- whom an attempt does without ---------------------------------------------------------------


def suspecting(**suspects: str) -> dict[str, Ready]:
    return {node: ready(node, suspects=sorted(names)) for node, names in suspects.items()}


@pytest.mark.parametrize(
    ("suspects", "group"),
    [
        ({"a": "", "b": "", "c": ""}, "abc"),
        ({"a": "c", "b": "c", "c": ""}, "ab"),
        ({"a": "c", "b": "", "c": "a"}, "ab"),
        ({"a": "c", "b": "c", "c": "ab"}, "ab"),
        ({"a": "b", "b": ""}, "a"),
        ({"a": "", "b": "a"}, "b"),
        ({"a": "b", "b": "a"}, "a"),
        ({"a": "z", "b": ""}, "ab"),
        ({"a": "b", "b": "c", "c": "a", "d": ""}, "ad"),
    ],
)
def test_choose_group(suspects: dict[str, str], group: str) -> None:
    assert choose_group(suspecting(**suspects)) == set(group)


@pytest.mark.parametrize("idle", ["a", "b"])
@pytest.mark.parametrize("suspects", [{"a": "b", "b": "a"}, {"a": "b", "b": ""}])
def test_of_two_that_do_not_reach_each_other_the_one_that_brings_nothing_goes(
    idle: str, suspects: dict[str, str]
) -> None:
    readies = suspecting(**suspects)
    for node in {*"ab"} - {idle}:
        readies[node].tokens = 100
    assert choose_group(readies) == {*"ab"} - {idle}


@given(st.dictionaries(st.sampled_from(NODES), SETS, min_size=1))
def test_no_suspicion_is_left_in_a_group_and_nobody_is_left_out_without_one(
    suspects: dict[str, Collection[str]],
) -> None:
    readies = {node: ready(node, suspects=sorted(names)) for node, names in suspects.items()}
    group = choose_group(readies)
    assert not any(set(readies[node].suspects) & group for node in group)
    named = {name for names in suspects.values() for name in names} | {
        node for node, names in suspects.items() if names
    }
    assert set(suspects) - named <= group
