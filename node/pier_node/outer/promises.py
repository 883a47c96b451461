"""What binds a site until a round is decided: the ballot that it promised last, and its last vote; see quorum.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pier.v1.peer_pb2 import Ballot, Ready, Value
from pier_node.outer.quorum import order
from pier_node.outer.state import OuterState


class VoteLog(Protocol):
    """What remembers our last vote and promise across a crash: see journal.py."""

    def promise(self, round: int, ballot: Ballot) -> None:
        """Returns only when the promise to take part in no lower ballot would survive a crash."""

    def promised(self) -> tuple[int, Ballot]:
        """Round and ballot of the last promise."""

    def record(self, round: int, ballot_number: int, ballot_keeper: str, value: Value) -> None:
        """Returns only when the vote would survive a crash."""


@dataclass
class Voted:
    """Our last vote, and its result as long as we have it."""

    round: int
    ballot: Ballot
    value: Value
    shadow: OuterState | None


class Promises:
    """The last promise and the last vote of one site.

    Args:
        voted: the vote that the journal remembers, if it is for a round that is not decided here.
    """

    def __init__(self, journal: VoteLog, voted: Voted | None) -> None:
        self._journal, self.voted = journal, voted
        self._promised = journal.promised()
        if voted:
            self._promised = max(self._promised, (voted.round, voted.ballot), key=lambda it: (it[0], order(it[1])))

    def promise(self, round: int, ballot: Ballot) -> None:
        """Take part in no lower ballot from now on; it is on the disk when this returns. Raises PierError."""
        self._journal.promise(round, ballot)
        self._promised = round, ballot

    def vote(self, voted: Voted) -> None:
        """Remember a vote that is in the journal already."""
        self.voted = voted

    def engaged(self, committed: int) -> bool:
        """Whether we took part in an attempt at a round after the last committed one."""
        return self._promised[0] > committed

    def seen(self, coming: int) -> Ballot:
        """The highest ballot of the coming round that we have taken part in."""
        round, ballot = self._promised
        return ballot if round == coming else Ballot()

    def pledge(self, coming: int) -> bytes | None:
        """Digest of our vote for the coming round; empty: none; None: we were further once, and cannot say."""
        if self._promised[0] > coming:
            return None
        return self.voted.value.digest if self.voted and self.voted.round == coming else b""

    def announce(self, ready: Ready) -> None:
        """Say what we voted for, if somebody may have committed it without our knowledge."""
        if (voted := self.voted) and voted.round >= ready.round:
            ready.voted.CopyFrom(voted.value)
            ready.voted_in.CopyFrom(voted.ballot)
            ready.voted_round = voted.round
            ready.holds = voted.shadow is not None

    def release(self, committed: int) -> None:
        """A round is decided: a vote for it binds us no more, one for a later round does."""
        if self.voted and self.voted.round <= committed:
            self.voted = None
