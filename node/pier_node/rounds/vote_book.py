"""Counts the votes of the coming round: who voted for what in which ballot, and who voted for two things."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pier_node.config.run import SITES
from pier_node.rounds.commitments import BallotName
from pier_node.rounds.double_votes import contradict
from pier_node.rounds.quorum import order
from pier_proto.v1 import peer_pb2 as pb


class VoteBook:
    """The votes of the coming round that have arrived, including those of attempts that we have not heard of yet.

    It keeps the newest few of each sender: a sender of many votes pushes out only its own.
    """

    EACH = 4
    """Number of votes kept per sender."""

    def __init__(self) -> None:
        self._votes: dict[str, dict[BallotName, tuple[pb.Vote, pb.Signed]]] = {}

    def of(self, ballot: pb.Ballot) -> dict[str, pb.Vote]:
        """Votes in a ballot, by node."""
        name = order(ballot)
        return {node: votes[name][0] for node, votes in self._votes.items() if name in votes}

    def signed(self, ballot: pb.Ballot, group: Iterable[str]) -> list[pb.Signed]:
        """The votes of these members in a ballot, as they signed them."""
        return [self._votes[node][order(ballot)][1] for node in group]

    def count(self, vote: pb.Vote, signed: pb.Signed, welcome: Collection[str]) -> pb.DoubleVote | None:
        """Note a vote. When the book is full, unwelcome senders make room for welcome ones.

        Returns a proof that the node lies, if this vote contradicts one of its earlier votes.
        """
        if vote.node not in self._votes and len(self._votes) >= SITES:
            strangers = self._votes.keys() - welcome
            if vote.node not in welcome or not strangers:
                return None
            del self._votes[strangers.pop()]
        votes = self._votes.setdefault(vote.node, {})
        against = [its for earlier, its in votes.values() if contradict(earlier, vote)]
        votes.setdefault(order(vote.ballot), (vote, signed))  # the first counts: a link may rest on it already
        if len(votes) > self.EACH:
            del votes[min(votes)]
        return pb.DoubleVote(one=against[0], other=signed) if against else None

    def refutation(self, ballot: pb.Ballot, value: pb.Value) -> pb.Signed | None:
        """A vote that refutes a result: by a member of the attempt that computed it, for another; None if none does."""
        if order(ballot) != order(value.origin):
            return None
        votes = self.of(ballot)
        others = [node for node in value.members if node in votes and votes[node].digest != value.digest]
        return self.signed(ballot, others[:1])[0] if others else None

    def clear(self) -> None:
        """Forget all votes: the round is over."""
        self._votes.clear()
