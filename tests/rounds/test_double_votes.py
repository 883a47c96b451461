"""Two votes that no honest node casts convict it, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rounds.cases import ballot, link
from simulation.statements import PlainStatements

from pier_node.rounds.double_votes import contradict, double_votes, read_double_vote, refutes, remembers
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Ballot, DoubleVote, Ready, Value, Vote

ONE, OTHER, THIRD = b"1" * 32, b"2" * 32, b"3" * 32
READER = PlainStatements("reader")


def vote(
    number: int, digest: bytes, prior: Ballot | None = None, of: bytes = b"", node: str = "a", round: int = 5
) -> Vote:
    return Vote(node=node, round=round, ballot=ballot(number, "k"), digest=digest, prior=prior, prior_digest=of)


FIRST = vote(2, ONE)
LIES = {
    "one ballot": vote(2, OTHER),
    "no word of the first": vote(3, OTHER),
    "word of an earlier one only": vote(3, OTHER, ballot(1, "k"), THIRD),
    "word of other bits": vote(3, OTHER, ballot(2, "k"), OTHER),
}
TRUTHS = {
    "the same bits": vote(3, ONE),
    "another round": vote(2, OTHER, round=6),
    "another node": vote(2, OTHER, node="b"),
    "word of the first": vote(3, OTHER, ballot(2, "k"), ONE),
    "word of a later one": vote(4, OTHER, ballot(3, "k"), THIRD),
}


@pytest.mark.parametrize("other", LIES.values(), ids=LIES)
def test_a_node_that_votes_twice_is_convicted(other: Vote) -> None:
    assert contradict(FIRST, other)
    assert contradict(other, FIRST)
    signed = PlainStatements("a")
    assert read_double_vote(DoubleVote(one=signed.seal(other), other=signed.seal(FIRST)), READER) == "a"


@pytest.mark.parametrize("other", TRUTHS.values(), ids=TRUTHS)
def test_honest_votes_convict_nobody(other: Vote) -> None:
    assert not contradict(FIRST, other)
    assert not contradict(other, FIRST)
    proof = DoubleVote(one=PlainStatements("a").seal(FIRST), other=PlainStatements(other.node).seal(other))
    with pytest.raises(BadMessage, match="do not contradict each other"):
        read_double_vote(proof, READER)


@given(some.lists(some.tuples(some.integers(1, 3), some.sampled_from([ONE, OTHER, THIRD])), min_size=2, max_size=8))
def test_no_two_votes_of_a_node_that_remembers_its_last_one_contradict(steps: list[tuple[int, bytes]]) -> None:
    votes, number = [FIRST], 2
    for rise, digest in steps:
        number += rise
        votes.append(vote(number, digest, votes[-1].ballot, votes[-1].digest))
    assert not any(contradict(one, other) for one in votes for other in votes)


def test_nobody_can_convict_another_with_votes_that_it_did_not_sign() -> None:
    forged = PlainStatements("b").seal(LIES["one ballot"])
    forged.node = "a"
    with pytest.raises(BadMessage, match="has not signed"):
        read_double_vote(DoubleVote(one=PlainStatements("a").seal(FIRST), other=forged), READER)


def test_two_proofs_of_one_round_convict_who_is_in_both() -> None:
    ours, theirs = link(5, THIRD, ONE, "abl"), link(5, THIRD, OTHER, "cdl")
    assert [it.one.node for it in double_votes(ours, theirs, READER)] == ["l"]
    assert double_votes(ours, link(5, THIRD, OTHER, "cd"), READER) == []
    assert double_votes(ours, ours, READER) == []


def announced(digest: bytes) -> Ready:
    value = Value(origin=ballot(2, "k"), digest=digest, members=["a", "b"])
    return Ready(node="a", round=5, voted=value, voted_in=ballot(2, "k"))


@pytest.mark.parametrize(
    ("other", "does"),
    [
        (vote(2, OTHER, node="b"), True),
        (vote(2, ONE, node="b"), False),
        (vote(2, OTHER, node="c"), False),
        (vote(3, OTHER, node="b"), False),
        (vote(2, OTHER, node="b", round=6), False),
    ],
    ids=["other bits", "the same bits", "no member", "another ballot", "another round"],
)
def test_only_another_members_vote_for_other_bits_refutes(other: Vote, does: bool) -> None:
    assert refutes(other, announced(ONE)) is does


def test_a_vote_remembers_what_its_announcement_said() -> None:
    assert remembers(vote(3, OTHER, ballot(2, "k"), ONE), announced(ONE))
    assert remembers(FIRST, Ready(node="a", round=5))
    assert not remembers(FIRST, announced(ONE))
    assert not remembers(vote(3, OTHER, ballot(2, "k"), OTHER), announced(ONE))
    assert not remembers(vote(3, OTHER, ballot(1, "k"), ONE), Ready(node="a", round=5))
