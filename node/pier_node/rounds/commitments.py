"""Commitments: what a site has told others about rounds, exactly as its disk has it.

This is the durable half of the rule that keeps replicas from forking (docs/protocol.md, "Why it cannot fork");
quorum.py is the other half. A site writes its next Commitments before it acts on them: before it takes part in an
attempt, sends a vote, gives votes away or takes some, or says that it holds a committed state. Commitments are pure;
tests/rounds/explorer.py tries every order of these steps with messages, crashes and restarts.

Promises keeps one site's Commitments on disk, always written before they count, and the result that the site voted for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

from pier_node.base.tasks import run_to_end
from pier_node.outer.state import OuterState
from pier_node.rounds.statements import Statements
from pier_proto.v1.peer_pb2 import Ballot, Handover, Ready, Signed, Value

BallotName = tuple[int, str]
"""Number and leader; ballots are ordered by these."""
NO_BALLOT: BallotName = (0, "")


@dataclass(frozen=True)
class Cast:
    """A vote in `ballot` for the result of `origin` with this digest; `members` took part in attempts at it."""

    ballot: BallotName
    origin: BallotName
    digest: bytes
    members: tuple[str, ...]

    @classmethod
    def of(cls, ballot: Ballot, value: Value) -> Self:
        """The vote that these messages state."""
        origin = value.origin.number, value.origin.leader
        return cls((ballot.number, ballot.leader), origin, bytes(value.digest), tuple(value.members))

    @property
    def value(self) -> Value:
        """The result that is voted for, as a message."""
        return Value(origin=as_ballot(self.origin), digest=self.digest, members=self.members)


@dataclass(frozen=True)
class Given:
    """Votes that a site gave to an heir when it stopped."""

    heir: str
    votes: frozenset[str]


@dataclass(frozen=True)
class Commitments:
    """What binds one site.

    Attributes:
        committed: the last round whose state this site has said that it holds. If its disk holds only an earlier one,
            the disk has lost a committed state, and the site takes no part in any decision until it has that state
            again.
        votes: votes of members of round `committed` that this site holds. Each member has one vote, and holds it itself
            until it gives it away.
        given: the votes that it gave away, handover by handover, whether or not the heir has heard of it.
        handovers: the signed statements by which it got votes other than its own, serialized.
        promised: the highest ballot of the round after `committed` in which this site has taken part.
        vote: its last vote in that round.
    """

    committed: int
    votes: frozenset[str]
    promised: BallotName = NO_BALLOT
    vote: Cast | None = None
    given: tuple[Given, ...] = ()
    handovers: frozenset[bytes] = frozenset()

    @classmethod
    def fresh(cls, committed: int, node: str) -> Self:
        """The commitments of a site that has promised nothing yet and holds its own vote."""
        return cls(committed, frozenset({node}))

    @property
    def engaged(self) -> bool:
        """Whether this site took part in an attempt at the round after `committed`."""
        return self.promised != NO_BALLOT

    def settled(self, round: int, node: str) -> Commitments:
        """After the site has kept a committed state: a later round frees it from all that it said about earlier ones.

        A state of the same round or an earlier one changes nothing: votes that were given away stay away.
        """
        return Commitments.fresh(round, node) if round > self.committed else self

    def promising(self, ballot: BallotName) -> Commitments:
        """Before the site takes part in an attempt. Raises ValueError unless the ballot is above all earlier ones."""
        if ballot <= self.promised:
            raise ValueError(f"ballot {ballot} is not above {self.promised}")
        return replace(self, promised=ballot)

    def casting(self, vote: Cast) -> Commitments:
        """Before the vote leaves the site. Raises ValueError unless it is in the ballot that was promised last."""
        if vote.ballot != self.promised:
            raise ValueError(f"a vote in ballot {vote.ballot}, but {self.promised} is promised")
        return replace(self, vote=vote)

    def giving(self, heir: str) -> Commitments:
        """Before the site offers its votes to an heir. Raises ValueError if they are bound: no heir could know it."""
        if self.engaged:
            raise ValueError("the votes are bound by an attempt")
        return replace(self, votes=frozenset(), given=(*self.given, Given(heir, self.votes)))

    def taking(self, round: int, votes: frozenset[str], handovers: frozenset[bytes] = frozenset()) -> Commitments:
        """Before an heir says that it took these votes. Raises ValueError if another round's members own them."""
        if round != self.committed:
            raise ValueError(f"votes after round {round}, and round {self.committed} is committed here")
        return replace(self, votes=self.votes | votes, handovers=self.handovers | handovers)


def as_ballot(name: BallotName) -> Ballot:
    """The message that names a ballot."""
    return Ballot(number=name[0], leader=name[1])


T = TypeVar("T")

log = logging.getLogger(__name__)


class Journal(Protocol):
    """Remembers Commitments across a crash: see pier_node/site/journal.py."""

    def load(self, round: int, node: str) -> Commitments:
        """The commitments of a site whose disk holds the state of `round`."""

    def keep(self, commitments: Commitments) -> None:
        """Return once the commitments would survive a crash. Raises PierError if they cannot be written."""


class Superseded(Exception):
    """A site's announcement is out of date: the site cannot take part on the strength of it."""


class Promises:
    """What binds the site `node`, whose newest state is of `round`.

    Attributes:
        now: the commitments that are on disk.
        shadow: the staged result of our last vote; None if there is none or a restart lost it.
    """

    def __init__(self, journal: Journal, node: str, round: int) -> None:
        self._journal, self._node, self._round = journal, node, round
        self.now = journal.load(round, node)
        self.shadow: OuterState | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def lost(self) -> bool:
        """Whether this site committed a later round than its disk has: until it has that again, it decides nothing."""
        return self._round < self.now.committed

    @property
    def votes(self) -> frozenset[str]:
        """Votes of the last round's members that this site holds."""
        return frozenset() if self.lost else self.now.votes

    async def settle(self, round: int) -> None:
        """Note that the state of this round is committed and on our disk. Raises PierError."""
        await self._change(lambda now: now.settled(round, self._node))
        self._round = round

    async def promise(self, ballot: Ballot, votes: Collection[str]) -> None:
        """Promise to take part in no lower ballot from now on.

        Args:
            votes: the votes that we announced.

        Raises:
            Superseded: they are no longer the votes that we hold.
            PierError: the promise cannot be written.
        """

        def promised(now: Commitments) -> Commitments:
            if self.lost or now.votes != set(votes):
                raise Superseded
            return now.promising((ballot.number, ballot.leader))

        await self._change(promised)

    async def cast(self, vote: Cast, shadow: OuterState) -> None:
        """Vote for a result that we hold. Raises PierError."""
        await self._change(lambda now: now.casting(vote), shadow)

    async def give(self, heir: str) -> frozenset[str]:
        """Give all our votes to the heir; return those that it may have now. Raises PierError."""
        votes = self.votes
        if not votes or self.now.engaged:  # an heir would not know what binds them
            return frozenset()
        await self._change(lambda now: now if now.engaged else now.giving(heir))
        return votes - self.now.votes

    def has_taken(self, handover: bytes) -> bool:
        """Whether this statement's votes were taken before: whoever gave them may have got them back since."""
        return any(Signed.FromString(it).statement == handover for it in self.now.handovers)

    async def take(self, round: int, votes: Collection[str], handovers: Iterable[Signed] = ()) -> None:
        """Take over votes of members of that round. Raises PierError, and ValueError if it is not the last round."""
        written = frozenset(it.SerializeToString() for it in handovers)
        await self._change(lambda now: now.taking(round, frozenset(votes), written))

    def handovers(self, base: bytes, statements: Statements) -> list[Signed]:
        """The handovers that prove which votes we hold and gave away; `base` is the digest of our state."""
        round = self.now.committed
        ours = [
            Handover(node=self._node, heir=it.heir, round=round, base=base, votes=sorted(it.votes), number=number)
            for number, it in enumerate(self.now.given, 1)
        ]
        return [*map(Signed.FromString, sorted(self.now.handovers)), *map(statements.seal, ours)]

    def announce(self, ready: Ready) -> None:
        """Write our commitments into an announcement."""
        ready.votes.extend(sorted(self.votes))
        ready.seen.CopyFrom(as_ballot(self.now.promised))
        if vote := self.now.vote:
            ready.voted.CopyFrom(vote.value)
            ready.voted_in.CopyFrom(as_ballot(vote.ballot))
            ready.holds = self.shadow is not None

    async def _change(self, change: Callable[[Commitments], Commitments], shadow: OuterState | None = None) -> None:
        async with self._one_at_a_time:
            changed = change(self.now)
            if changed != self.now:
                await run_to_end(self._write(changed, shadow))

    async def _write(self, changed: Commitments, shadow: OuterState | None) -> None:
        await asyncio.to_thread(self._journal.keep, changed)
        self.now = changed
        if shadow or not changed.vote:
            self.shadow = shadow
