from __future__ import annotations

from rounds.cases import ballot
from rounds.parts import BALLOT, signed, vote

from pier_node.config.run import SITES
from pier_node.rounds.double_votes import VoteBook
from pier_proto.v1.peer_pb2 import Signed


def test_votes_may_come_before_their_attempt() -> None:
    book = VoteBook()
    for node in "ba":
        book.count(vote(node), signed(vote(node)), "ab")
    assert book.of(BALLOT) == {"a": vote("a"), "b": vote("b")}
    assert book.signed(BALLOT, "ab") == [signed(vote("a")), signed(vote("b"))]
    assert book.of(ballot(4)) == {}
    book.clear()
    assert book.of(BALLOT) == {}


def test_a_flood_of_ballots_takes_no_more_memory_and_drops_the_oldest() -> None:
    book = VoteBook()
    for number in range(1, 1000):
        book.count(vote("a", number), signed(vote("a", number)), "ab")
    assert [number for number in range(1, 1000) if book.of(ballot(number))] == [996, 997, 998, 999]
    assert book.of(ballot(999)) == {"a": vote("a", 999)}


def test_the_first_vote_of_a_node_in_a_ballot_counts() -> None:
    """A later one with another plan convicts nobody, and would spoil the link."""
    book, later = VoteBook(), vote("a")
    later.plan = b"q" * 32
    for it in (vote("a"), later):
        book.count(it, signed(it), "ab")
    assert book.signed(BALLOT, "a") == [signed(vote("a"))]


def test_a_flood_pushes_out_nobody_elses_vote() -> None:
    """A liar's votes for ballots to come must not evict the vote that an attempt waits for."""
    book = VoteBook()
    book.count(vote("b"), signed(vote("b")), "ab")
    for number in range(4, 1000):
        book.count(vote("a", number), signed(vote("a", number)), "ab")
    assert book.of(BALLOT) == {"b": vote("b")}


def test_no_more_voters_are_heard_than_a_run_has_sites() -> None:
    book = VoteBook()
    for number in range(SITES + 1):
        book.count(vote(f"{number:04}"), Signed(), "ab")
    assert len(book.of(BALLOT)) == SITES
    for node in "ab":
        book.count(vote(node), Signed(), "ab")
    assert len(book.of(BALLOT)) == SITES
    assert {"a", "b"} <= book.of(BALLOT).keys(), "strangers make room for members"
