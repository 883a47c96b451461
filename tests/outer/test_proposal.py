"""Whatever a keeper proposes, a member checks: each flaw is found, and a good proposal has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pier.v1.peer_pb2 import Ballot, Proposal, Ready, Share
from pier_node.outer.proposal import flaw

BASE = ("a", "b", "c")


def ready(seen: int) -> Ready:
    return Ready(node="a", round=5, nonce=b"now", seen=Ballot(number=seen, keeper="a"))


def good() -> Proposal:
    shares = [
        Share(node="a", offset=0, length=4, nonce=b"now", votes=["a"]),
        Share(node="b", offset=4, length=6, nonce=b"x", votes=["b"]),
    ]
    return Proposal(round=5, ballot=Ballot(number=2, keeper="a"), shares=shares)


def found(proposal: Proposal, seen: int = 1) -> str:
    return flaw(proposal, ready(seen), BASE, 10)


def test_a_good_one() -> None:
    assert found(good()) == ""


def test_a_ballot_must_be_above_all_that_were_seen() -> None:
    assert found(good(), seen=2) == "an old ballot"
    assert found(good(), seen=3) == "an old ballot"


def _round(proposal: Proposal) -> None:
    proposal.round = 4


def _not_in_it(proposal: Proposal) -> None:
    proposal.shares[0].node = "Z"


def _twice(proposal: Proposal) -> None:
    proposal.shares[1].node = "a"


def _stale(proposal: Proposal) -> None:
    proposal.shares[0].nonce = b"before"


def _weighted(proposal: Proposal) -> None:
    proposal.shares[0].tokens = 1 << 40


def _lengthened(proposal: Proposal) -> None:
    proposal.shares[0].norm = 1e9


def _alone(proposal: Proposal) -> None:
    proposal.shares[1].ClearField("votes")


def _borrowed(proposal: Proposal) -> None:
    proposal.shares[1].votes[:] = ["a"]


def _gap(proposal: Proposal) -> None:
    proposal.shares[1].offset = 5


def _short(proposal: Proposal) -> None:
    proposal.shares[1].length = 5


FLAWS: list[tuple[Callable[[Proposal], None], str]] = [
    (_round, "another round"),
    (_not_in_it, "stale"),
    (_twice, "members out of order"),
    (_stale, "stale"),
    (_weighted, "other tokens, or another norm, than were announced"),
    (_lengthened, "other tokens, or another norm, than were announced"),
    (_alone, "no quorum"),
    (_borrowed, "no quorum"),
    (_gap, "shards do not cover the vector"),
    (_short, "shards do not cover the vector"),
]


@pytest.mark.parametrize(("spoil", "reason"), FLAWS, ids=[spoil.__name__ for spoil, _ in FLAWS])
def test_flaws(spoil: Callable[[Proposal], None], reason: str) -> None:
    proposal = good()
    spoil(proposal)
    assert found(proposal) == reason
