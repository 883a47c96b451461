from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds.cases import ballot, ready, value, voter

from pier_node.rounds.quorum import (
    LEAP,
    Adopt,
    Announcement,
    Base,
    Blocked,
    Fresh,
    choose_group,
    choose_value,
    flaw,
    has_quorum,
    next_ballot,
    order,
)
from pier_proto.v1.peer_pb2 import Handover, Proposal, Ready, Share, Signed, Value

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
    assert has_quorum(votes, Base(base)) is enough


@pytest.mark.parametrize(
    ("votes", "base", "enough"),
    [
        ("ab", "abcd", False),
        ("abw", "abcd", True),
        ("cdw", "abcd", True),
        ("aw", "abcd", False),
        ("abcw", "abcde", True),
        ("abw", "abcde", False),
        ("bw", "ab", True),
        ("a", "ab", False),
        ("w", "", False),
    ],
)
def test_a_witness_decides_an_even_split(votes: str, base: str, enough: bool) -> None:
    assert has_quorum(votes, Base(base, witness="w")) is enough


def test_two_groups_that_share_no_vote_never_both_have_a_quorum() -> None:
    for size in range(1, len(NODES) + 1):
        base = NODES[:size]
        for count in range(size + 1):
            for votes in combinations(base, count):
                assert not (has_quorum(votes, Base(base)) and has_quorum(set(base) - set(votes), Base(base)))


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
    if all(has_quorum(votes, Base(base)) for votes in carried):
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
        if has_quorum(group, Base(self.base)):
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
    assert has_quorum(votes, Base(base, convicted)) is enough


@pytest.mark.parametrize("size", range(1, 7))
def test_two_groups_of_honest_nodes_that_decide_share_one(size: int) -> None:
    """With a node that has voted twice a group that decides without it would decide by the usual rule."""
    base = "abcdefg"[:size]
    for liar in base:
        honest = [node for node in base if node != liar]
        groups = [set(it) for count in range(size) for it in combinations(honest, count)]
        able = [group for group in groups if has_quorum(group, Base(base, liar))]
        assert all(one & other for one in able for other in able)
        assert all(has_quorum(group | {liar}, Base(base)) for group in able)


def test_nobody_waits_for_a_result_that_only_who_voted_twice_may_have() -> None:
    lost = voter("a", X)
    lost.holds = False
    assert isinstance(choose_value([lost]), Blocked)
    assert choose_value([lost], convicted="bcd") == Fresh()


# --- whom an attempt does without ---------------------------------------------------------------


def suspecting(**suspects: str) -> dict[str, Ready]:
    return {node: ready(node, suspects=sorted(names)) for node, names in suspects.items()}


def chosen(readies: dict[str, Ready], enough: Callable[[frozenset[str]], bool] = lambda _group: True) -> frozenset[str]:
    return choose_group(readies, frozenset(readies), enough)


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
    assert chosen(suspecting(**suspects)) == set(group)


def test_nobody_goes_whom_the_quorum_needs() -> None:
    readies = suspecting(a="bc", b="c", c="a", d="")
    assert chosen(readies) == {*"ad"}
    assert chosen(readies, enough=lambda group: len(group) >= 3) == {*"abd"}
    assert chosen(readies, enough=lambda group: len(group) >= 4) == {*"abcd"}


@pytest.mark.parametrize("idle", ["a", "b"])
@pytest.mark.parametrize("suspects", [{"a": "b", "b": "a"}, {"a": "b", "b": ""}])
def test_of_two_that_do_not_reach_each_other_the_one_that_brings_nothing_goes(
    idle: str, suspects: dict[str, str]
) -> None:
    readies = suspecting(**suspects)
    for node in {*"ab"} - {idle}:
        readies[node].tokens = 100
    assert chosen(readies) == {*"ab"} - {idle}


@given(st.dictionaries(st.sampled_from(NODES), SETS, min_size=1))
def test_no_suspicion_is_left_in_a_group_and_nobody_is_left_out_without_one(
    suspects: dict[str, Collection[str]],
) -> None:
    readies = {node: ready(node, suspects=sorted(names)) for node, names in suspects.items()}
    group = chosen(readies)
    assert not any(set(readies[node].suspects) & group for node in group)
    named = {name for names in suspects.values() for name in names} | {
        node for node, names in suspects.items() if names
    }
    assert set(suspects) - named <= group


BASE, STATE, OLD = Base(("a", "b", "c")), b"s" * 32, b"o" * 32


def announcement(node: str, seen: int = 1) -> Ready:
    first = ballot(seen, "a")
    return Ready(node=node, round=5, nonce=node.encode(), seen=first, tokens=7, norm=0.5, votes=[node], base=STATE)


@dataclass
class Offer:
    """A good proposal to the member a, by the leader a; a test spoils it, or what it rests on."""

    mine: Ready = field(default_factory=lambda: announcement("a"))
    proposal: Proposal = field(default_factory=lambda: Proposal(round=5, ballot=ballot(2, "a")))
    announced: dict[str, Announcement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node, offset, length in (("a", 0, 4), ("b", 4, 6)):
            self.proposal.shares.append(Share(node=node, tokens=7, norm=0.5, offset=offset, length=length))
            self.announced[node] = Announcement(announcement(node))

    @property
    def flaw(self) -> str:
        return flaw(self.proposal, self.mine, self.announced, BASE, BASE.members, 10)

    def says(self, node: str) -> Ready:
        return self.announced[node].ready

    def voted(self, node: str, digest: str, number: int = 1, holds: bool = True) -> None:
        it = self.says(node)
        it.voted.CopyFrom(value(digest, "abc"))
        it.voted_in.CopyFrom(ballot(number, "a"))
        it.holds = holds


def test_a_good_one() -> None:
    assert Offer().flaw == ""


@pytest.mark.parametrize("seen", [2, 3])
def test_a_ballot_must_be_above_all_that_were_seen(seen: int) -> None:
    assert Offer(mine=announcement("a", seen)).flaw == "an old ballot"


def _round(offer: Offer) -> None:
    offer.proposal.round = 4


def _not_in_it(offer: Offer) -> None:
    offer.proposal.shares[0].node = "Z"


def _left_out(offer: Offer) -> None:
    del offer.proposal.shares[0], offer.announced["a"]


def _twice(offer: Offer) -> None:
    offer.proposal.shares[1].node = "a"


def _of_others(offer: Offer) -> None:
    del offer.announced["b"]


def _stale(offer: Offer) -> None:
    """An old announcement of the member, which it signed, but has voided since."""
    offer.says("a").nonce = b"before"


def _weighted(offer: Offer) -> None:
    offer.proposal.shares[0].tokens = 1 << 40


def _another_weighted(offer: Offer) -> None:
    offer.proposal.shares[1].tokens = 0


def _lengthened(offer: Offer) -> None:
    offer.proposal.shares[0].norm = 1e9


def _alone(offer: Offer) -> None:
    """b has given its vote away."""
    given = Handover(node="b", heir="z", round=4, base=STATE, votes=["b"], number=1)
    offer.announced["b"] = Announcement(announcement("b"), [given])


def _borrowed(offer: Offer) -> None:
    """It has the vote of c by somebody who never had it."""
    _alone(offer)
    stolen = Handover(node="d", heir="b", round=4, base=STATE, votes=["c"], number=1)
    offer.announced["b"] = Announcement(announcement("b"), [*offer.announced["b"].handovers, stolen])


def _everybodys(offer: Offer) -> None:
    """Votes of members that have handed nothing over."""
    del offer.proposal.shares[1], offer.announced["b"]
    offer.proposal.shares[0].length = 10
    offer.says("a").votes[:] = ["a", "b", "c"]


def _handed_over_before(offer: Offer) -> None:
    """Handovers of an earlier round, and of another state."""
    _everybodys(offer)
    given = [Handover(node="b", heir="a", round=it, base=base, votes=["b"]) for it, base in ((3, STATE), (4, OLD))]
    offer.announced["a"] = Announcement(offer.says("a"), given)


def _foreign(offer: Offer) -> None:
    """A group of a fresh non-member with everybody's votes, and the member beside it."""
    stranger = announcement("0")
    stranger.votes[:] = ["a", "b", "c"]
    offer.announced = {"0": Announcement(stranger), "a": offer.announced["a"]}
    offer.proposal.shares[1].node, offer.proposal.shares[0].node = "a", "0"
    offer.proposal.ballot.leader = "0"


def _leader_without_a_vote(offer: Offer) -> None:
    """A quorum is there, led by somebody whom nobody trusted with anything."""
    offer.proposal.ballot.leader = "z"


def _leader_with_invented_votes(offer: Offer) -> None:
    stranger = announcement("z")
    stranger.votes[:] = ["c"]
    offer.announced["z"] = Announcement(stranger)
    offer.proposal.shares.add(node="z", tokens=7, norm=0.5, offset=10, length=0)
    offer.proposal.ballot.leader = "z"


def _elsewhere(offer: Offer) -> None:
    offer.says("b").base = OLD


def _of_a_later_round(offer: Offer) -> None:
    offer.says("b").round = 6


def _leaping(offer: Offer) -> None:
    offer.proposal.ballot.number = 3


def _led_far_up(offer: Offer) -> None:
    """Another member claims to have seen a ballot that attempts cannot have come to."""
    offer.says("b").seen.number = 1 + LEAP
    offer.proposal.ballot.number = 2 + LEAP


def _adopts_what_nobody_announced(offer: Offer) -> None:
    offer.proposal.adopt.CopyFrom(value("x", "abc"))


def _adopts_another(offer: Offer) -> None:
    offer.voted("b", "x")
    offer.proposal.adopt.CopyFrom(value("y", "abc"))


def _adopts_with_other_members(offer: Offer) -> None:
    offer.voted("b", "x")
    offer.proposal.adopt.CopyFrom(value("x", "ab"))


def _adopts_an_earlier_vote(offer: Offer) -> None:
    offer.voted("a", "y", number=1)
    offer.voted("b", "x", number=2)
    offer.says("b").seen.number = 2
    offer.proposal.ballot.number = 3
    offer.proposal.adopt.CopyFrom(value("y", "abc"))


def _computes_anew(offer: Offer) -> None:
    offer.voted("b", "x")


def _forgets_who_is_missing(offer: Offer) -> None:
    offer.voted("a", "x", number=2, holds=False)
    offer.voted("b", "x", number=2, holds=False)
    for node in "ab":
        offer.says(node).seen.number = 2
    offer.proposal.ballot.number = 3


def _gap(offer: Offer) -> None:
    offer.proposal.shares[1].offset = 5


def _short(offer: Offer) -> None:
    offer.proposal.shares[1].length = 5


ANOTHER = "another result than the announcements ask for"
UNTRUE = "other tokens, or another norm, than were announced"
FLAWS: list[tuple[Callable[[Offer], None], str]] = [
    (_round, "another round"),
    (_not_in_it, "members out of order"),
    (_left_out, "stale"),
    (_twice, "members out of order"),
    (_of_others, "members out of order"),
    (_stale, "stale"),
    (_weighted, UNTRUE),
    (_another_weighted, UNTRUE),
    (_lengthened, UNTRUE),
    (_alone, "no quorum"),
    (_borrowed, "no quorum"),
    (_everybodys, "no quorum"),
    (_handed_over_before, "no quorum"),
    (_foreign, "no quorum"),
    (_leader_without_a_vote, "a leader that may not lead while others are here that may"),
    (_leader_with_invented_votes, "a leader that may not lead while others are here that may"),
    (_elsewhere, "members at another state"),
    (_of_a_later_round, "members at another state"),
    (_leaping, "a ballot that does not follow"),
    (_led_far_up, "a ballot far above all that this site has seen"),
    (_adopts_what_nobody_announced, ANOTHER),
    (_adopts_another, ANOTHER),
    (_adopts_with_other_members, ANOTHER),
    (_adopts_an_earlier_vote, ANOTHER),
    (_computes_anew, ANOTHER),
    (_forgets_who_is_missing, "a result may have been committed by others"),
    (_gap, "shards do not cover the vector"),
    (_short, "shards do not cover the vector"),
]


@pytest.mark.parametrize(("spoil", "reason"), FLAWS, ids=[spoil.__name__ for spoil, _ in FLAWS])
def test_flaws(spoil: Callable[[Offer], None], reason: str) -> None:
    offer = Offer()
    spoil(offer)
    assert offer.flaw == reason


def test_what_was_announced_is_adopted() -> None:
    offer = Offer()
    offer.voted("b", "x")
    offer.proposal.adopt.CopyFrom(value("x", "abc"))
    assert offer.flaw == ""


def test_votes_that_were_handed_over_count() -> None:
    offer = Offer()
    _everybodys(offer)
    given = Handover(node="b", heir="a", round=4, base=STATE, votes=["b"])
    offer.announced["a"] = Announcement(offer.says("a"), [given])
    assert offer.flaw == ""


def stranger_with(**voted: Any) -> Offer:
    """A good offer, and one more member, which was none before and says that it voted."""
    offer, says = Offer(), announcement("z")
    says.MergeFrom(Ready(**voted))
    offer.announced["z"] = Announcement(says)
    offer.proposal.shares.add(node="z", tokens=7, norm=0.5, offset=10, length=0)
    return offer


def test_the_word_of_a_stranger_about_votes_counts_for_nothing() -> None:
    """Or it could have a state of its own making adopted by all."""
    made_up = value("z", "z", ballot(2))
    offer = stranger_with(voted=made_up, voted_in=ballot(2), holds=True)
    assert offer.flaw == ""
    offer.proposal.adopt.CopyFrom(made_up)
    assert offer.flaw == ANOTHER
