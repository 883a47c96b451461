from __future__ import annotations

import pytest
from outer.cases import Memory, ballot, outer_state, ready, value

from pier.v1.peer_pb2 import Ballot
from pier_node.outer.promises import Promises, Voted

X = value("x", "abc")


def voted(round: int, number: int = 1, held: bool = True) -> Voted:
    return Voted(round, ballot(number), X, outer_state("abc", round) if held else None)


def promises(vote: Voted | None = None) -> Promises:
    return Promises(Memory([], (5, ballot(3))), vote)


def test_what_the_journal_remembers_binds() -> None:
    assert promises().seen(5) == ballot(3)
    assert (promises().engaged(4), promises().engaged(5)) == (True, False)
    assert promises().seen(6) == Ballot(), "of that round nothing was promised"


@pytest.mark.parametrize(("number", "seen"), [(2, 3), (4, 4)])
def test_a_vote_is_a_promise_too(number: int, seen: int) -> None:
    assert promises(voted(5, number)).seen(5) == ballot(seen)


def test_a_promise_is_in_the_journal_before_it_counts() -> None:
    journal = Memory([], (5, ballot(3)))
    made = Promises(journal, None)
    made.promise(6, ballot(1))
    assert made.seen(6) == Promises(journal, None).seen(6) == ballot(1)


@pytest.mark.parametrize("held", [True, False])
def test_a_vote_that_may_have_been_committed_is_told(held: bool) -> None:
    told = ready("a", 5)
    promises(voted(5, 2, held)).announce(told)
    assert (told.voted, told.voted_in, told.voted_round, told.holds) == (X, ballot(2), 5, held)


def test_a_vote_for_a_round_that_is_over_is_not() -> None:
    told = ready("a", 6)
    promises(voted(5)).announce(told)
    assert not told.HasField("voted")


def test_a_vote_binds_until_its_round_is_decided() -> None:
    made = promises()
    assert made.pledge(5) == b""
    made.vote(voted(6))
    assert (made.pledge(6), made.pledge(7)) == (X.digest, b"")
    made.release(5)
    assert made.voted
    made.release(6)
    assert made.voted is None


def test_who_has_lost_rounds_does_not_deny_them() -> None:
    assert (promises().pledge(4), promises(voted(9)).pledge(6)) == (None, None)
