"""Commitments: what a site has told others about rounds, exactly as its disk has it. Pure.

This is the durable half of the rule that keeps replicas from forking (docs/protocol.md, "Why it cannot fork");
quorum.py is the other half. A site writes the next Commitments before it acts on them: before it takes part in an
attempt, before its vote leaves it, before it gives votes away or takes some, and before it says that it holds a
committed state. tests/outer/explorer.py walks through every order of these steps, of messages, crashes and restarts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from pier.v1.peer_pb2 import Ballot, Value

BallotName = tuple[int, str]
"""Number and keeper: ballots are ordered so."""
NO_BALLOT: BallotName = (0, "")


@dataclass(frozen=True)
class Cast:
    """A vote: for the result of `origin` with this digest, in `ballot`; `members` took part in attempts at it."""

    ballot: BallotName
    origin: BallotName
    digest: bytes
    members: tuple[str, ...]

    @classmethod
    def of(cls, ballot: Ballot, value: Value) -> Self:
        """From the messages that say it."""
        origin = value.origin.number, value.origin.keeper
        return cls((ballot.number, ballot.keeper), origin, bytes(value.digest), tuple(value.members))

    @property
    def value(self) -> Value:
        """What is voted for, as a message."""
        return Value(origin=as_ballot(self.origin), digest=self.digest, members=self.members)


@dataclass(frozen=True)
class Gift:
    """Votes that a site gave to an heir when it stopped."""

    heir: str
    votes: frozenset[str]


@dataclass(frozen=True)
class Commitments:
    """What binds one site.

    Attributes:
        committed: the last round whose state this site has said that it holds. If its disk holds only an earlier one,
            it has lost what it was trusted with, and takes no part in any decision until it has that state again.
        votes: of the members of round `committed`, in this site's hand. Each member has one, and holds it itself until
            it gives it away.
        gifts: what it gave away, one gift after the other, whether or not the heir has heard of it.
        handovers: the signed statements by which it got votes that are not its own, serialized.
        promised: the highest ballot of the round after `committed` that this site has taken part in.
        vote: its last vote in that round.
    """

    committed: int
    votes: frozenset[str]
    promised: BallotName = NO_BALLOT
    vote: Cast | None = None
    gifts: tuple[Gift, ...] = ()
    handovers: frozenset[bytes] = frozenset()

    @classmethod
    def fresh(cls, committed: int, node: str) -> Self:
        """Nothing is promised yet, and the site has its own vote."""
        return cls(committed, frozenset({node}))

    @property
    def engaged(self) -> bool:
        """Whether this site took part in an attempt at the round after `committed`."""
        return self.promised != NO_BALLOT

    def settled(self, round: int, node: str) -> Commitments:
        """After the site has kept a committed state: a later round frees it of all that it said about earlier ones.

        The state of the same round, or of an earlier one, changes nothing: votes that were given away stay away.
        """
        return Commitments.fresh(round, node) if round > self.committed else self

    def promising(self, ballot: BallotName) -> Commitments:
        """Before the site takes part in an attempt. Raises ValueError unless the ballot is above all before."""
        if ballot <= self.promised:
            raise ValueError(f"ballot {ballot} is not above {self.promised}")
        return replace(self, promised=ballot)

    def casting(self, vote: Cast) -> Commitments:
        """Before the vote leaves the site. Raises ValueError unless it is in the ballot that was promised last."""
        if vote.ballot != self.promised:
            raise ValueError(f"a vote in ballot {vote.ballot}, but {self.promised} is promised")
        return replace(self, vote=vote)

    def giving(self, heir: str) -> Commitments:
        """Before the site offers its votes to an heir. Raises ValueError: an heir would not know what binds them."""
        if self.engaged:
            raise ValueError("the votes are bound by an attempt")
        return replace(self, votes=frozenset(), gifts=(*self.gifts, Gift(heir, self.votes)))

    def taking(self, round: int, votes: frozenset[str], handovers: frozenset[bytes] = frozenset()) -> Commitments:
        """Before an heir says that it has taken these votes. Raises ValueError: they are of another round's members."""
        if round != self.committed:
            raise ValueError(f"votes after round {round}, and round {self.committed} is committed here")
        return replace(self, votes=self.votes | votes, handovers=self.handovers | handovers)


def as_ballot(name: BallotName) -> Ballot:
    """The message that names a ballot."""
    return Ballot(number=name[0], keeper=name[1])
