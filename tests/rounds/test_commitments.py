from __future__ import annotations

import pytest

from pier_node.rounds.commitments import NO_BALLOT, Cast, Commitments, Given, as_ballot

X = Cast((2, "a"), (2, "a"), b"x" * 32, ("a", "b"))
FRESH = Commitments.fresh(4, "a")
BOUND = FRESH.promising((2, "a")).casting(X)


def test_a_fresh_site_has_its_own_vote_and_nothing_binds_it() -> None:
    assert Commitments(4, frozenset("a"), NO_BALLOT, None) == FRESH
    assert not FRESH.engaged


def test_ballots_only_rise() -> None:
    for lower in ((2, "a"), (1, "z")):
        with pytest.raises(ValueError, match="not above"):
            BOUND.promising(lower)
    assert BOUND.promising((2, "b")).vote == X, "a promise does not undo a vote"


def test_a_vote_is_cast_in_the_ballot_that_was_promised_last() -> None:
    with pytest.raises(ValueError, match="is promised"):
        FRESH.casting(X)
    with pytest.raises(ValueError, match="is promised"):
        BOUND.promising((3, "a")).casting(X)


def test_a_later_round_frees_a_site_of_all_that_it_said_of_earlier_ones() -> None:
    assert BOUND.settled(5, "a") == Commitments.fresh(5, "a")


@pytest.mark.parametrize("round", [3, 4])
def test_an_earlier_state_or_the_same_frees_it_of_nothing(round: int) -> None:
    given = FRESH.giving("b")
    assert (BOUND.settled(round, "a"), given.settled(round, "a")) == (BOUND, given)


def test_votes_are_given_by_a_site_that_nothing_binds() -> None:
    given = FRESH.giving("b")
    assert given == Commitments(4, frozenset(), given=(Given("b", frozenset("a")),))
    with pytest.raises(ValueError, match="bound"):
        BOUND.giving("b")


def test_votes_are_taken_for_the_round_that_was_committed_last() -> None:
    taken = FRESH.taking(4, frozenset("bc"), frozenset({b"signed"}))
    assert taken == Commitments(4, frozenset("abc"), handovers=frozenset({b"signed"}))
    with pytest.raises(ValueError, match="round 4 is committed"):
        FRESH.taking(3, frozenset("b"))


def test_whoever_gets_back_a_vote_has_it_in_its_hand() -> None:
    assert FRESH.giving("b").taking(4, frozenset("a")).votes == {"a"}


def test_gifts_are_kept_in_their_order_with_all_that_was_in_the_hand() -> None:
    again = FRESH.giving("b").taking(4, frozenset("ab")).giving("c")
    assert again.given == (Given("b", frozenset("a")), Given("c", frozenset("ab")))
    assert not again.votes


def test_a_vote_comes_back_from_its_message_as_it_was() -> None:
    assert Cast.of(as_ballot(X.ballot), X.value) == X
