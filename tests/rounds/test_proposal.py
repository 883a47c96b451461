"""Whatever a leader proposes, a member checks: each forgery is found, and a good proposal has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from rounds.cases import ballot, value

from pier_node.rounds.proposal import Announcement, Base, flaw
from pier_node.rounds.quorum import LEAP
from pier_proto.v1.peer_pb2 import Handover, Proposal, Ready, Share

BASE, STATE, OLD = Base(("a", "b", "c")), b"s" * 32, b"o" * 32


def ready(node: str, seen: int = 1) -> Ready:
    first = ballot(seen, "a")
    return Ready(node=node, round=5, nonce=node.encode(), seen=first, tokens=7, norm=0.5, votes=[node], base=STATE)


@dataclass
class Offer:
    """A good proposal to the member a, by the leader a; a test spoils it, or what it rests on."""

    mine: Ready = field(default_factory=lambda: ready("a"))
    proposal: Proposal = field(default_factory=lambda: Proposal(round=5, ballot=ballot(2, "a")))
    announced: dict[str, Announcement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node, offset, length in (("a", 0, 4), ("b", 4, 6)):
            self.proposal.shares.append(Share(node=node, tokens=7, norm=0.5, offset=offset, length=length))
            self.announced[node] = Announcement(ready(node))

    @property
    def flaw(self) -> str:
        return flaw(self.proposal, self.mine, self.announced, BASE, 10)

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
    assert Offer(mine=ready("a", seen)).flaw == "an old ballot"


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
    offer.announced["b"] = Announcement(ready("b"), [given])


def _borrowed(offer: Offer) -> None:
    """It has the vote of c by somebody who never had it."""
    _alone(offer)
    stolen = Handover(node="d", heir="b", round=4, base=STATE, votes=["c"], number=1)
    offer.announced["b"] = Announcement(ready("b"), [*offer.announced["b"].handovers, stolen])


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
    stranger = ready("0")
    stranger.votes[:] = ["a", "b", "c"]
    offer.announced = {"0": Announcement(stranger), "a": offer.announced["a"]}
    offer.proposal.shares[1].node, offer.proposal.shares[0].node = "a", "0"
    offer.proposal.ballot.leader = "0"


def _leader_without_a_vote(offer: Offer) -> None:
    """A quorum is there, led by somebody whom nobody trusted with anything."""
    offer.proposal.ballot.leader = "z"


def _leader_with_invented_votes(offer: Offer) -> None:
    stranger = ready("z")
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
    (_leader_without_a_vote, "a leader that was no member of the last round, though members are here"),
    (_leader_with_invented_votes, "a leader that was no member of the last round, though members are here"),
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
    offer, says = Offer(), ready("z")
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
