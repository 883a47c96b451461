"""Who may decide a round, and what: the rules that keep two groups from committing different bits.

A round is one decision of Paxos (Lamport, "Paxos Made Simple", 2001); its value is the digest of the next state. A
commit needs the vote of *every* member of a group that holds a majority of the last round's members. Any two such
groups share a member. That member tells the leader of the later attempt what it voted for in the earlier one, and the
later attempt finishes that result (adopts it) instead of computing another. docs/protocol.md has the full argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pier_proto.v1.peer_pb2 import Ballot, Ready, Value


@dataclass(frozen=True)
class Fresh:
    """Nothing can have been decided yet: compute a result."""


@dataclass(frozen=True)
class Adopt:
    """Some site may have committed this result: finish it. `holders` have it."""

    value: Value
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Blocked:
    """Sites that are absent may have committed a result: wait for one of `missing`."""

    missing: tuple[str, ...]


LEAP = 1 << 20
"""A ballot number this far above what others have seen was not reached by attempts."""


def has_quorum(votes: Collection[str], base: Collection[str], convicted: Collection[str] = ()) -> bool:
    """Whether a group may decide: it needs the votes of a majority of the last round's members.

    Every member has one vote, and a site that stops politely hands its votes to one other site. A vote is in one hand
    at a time, so two groups cannot both have most of them. If the votes are split evenly, the side with the vote of the
    lowest node id continues, so that one of two sites can survive the loss of the other.

    Args:
        convicted: nodes that have voted twice (double_votes.py). A majority of the others is a quorum too: with the
            vote of a convicted node, which votes on any side, it would be one anyway, and two such quorums share a
            member.
    """
    honest = {*base} - {*convicted}
    return _has_most(votes, base) or (len(honest) < len(base) and _has_most(votes, honest))


def _has_most(votes: Collection[str], base: Collection[str]) -> bool:
    present = set(votes) & set(base)
    return 2 * len(present) > len(base) or (2 * len(present) == len(base) and min(base, default="") in present)


def leader_of(nodes: Collection[str], base: Collection[str]) -> str:
    """The leader of the coming round: of these nodes, the lowest member of the last round if any, else the lowest.

    A site that has just arrived cannot put itself in front of all others.
    """
    return min({*nodes} & {*base} or nodes, default="")


def order(ballot: Ballot) -> tuple[int, str]:
    """Sort key of ballots: number, then leader. A site takes part only in ballots above all those before."""
    return ballot.number, ballot.leader


def next_ballot(readies: Iterable[Ready], leader: str) -> Ballot:
    """A ballot above every one in which the group has taken part."""
    return Ballot(number=1 + max((ready.seen.number for ready in readies), default=0), leader=leader)


def choose_value(
    readies: Collection[Ready], voters: Collection[str] | None = None, convicted: Collection[str] = ()
) -> Fresh | Adopt | Blocked:
    """What an attempt of exactly these members must do.

    Args:
        voters: nodes whose word about votes counts: members of the last round, and heirs of their votes. Any two
            quorums share one of them, so nobody else is needed. None counts everyone.
        convicted: nodes that have voted twice: nobody waits for a result that only they may have.

    Only the newest vote counts (Paxos). Its result is finished if any site here holds it. If none does, because its
    voters were restarted, the vote is void once it is certain that nobody can have committed it: either one of its
    members is here and never voted for it, or all of them are here. A vote is also void if another member contradicted
    it in the attempt that computed its result: its voter saw that not all members were for it.
    """
    heard = [ready for ready in readies if voters is None or ready.node in voters]
    votes = [ready for ready in heard if ready.HasField("voted")]
    if not votes:
        return Fresh()
    newest = max(order(vote.voted_in) for vote in votes)
    top = [vote for vote in votes if order(vote.voted_in) == newest]
    if len({bytes(vote.voted.digest) for vote in top}) > 1 or any(vote.HasField("refutation") for vote in top):
        return Fresh()
    value = top[0].voted
    here = {ready.node for ready in readies}
    holders = tuple(sorted(vote.node for vote in heard if vote.holds and vote.voted.digest == value.digest))
    if holders:
        return Adopt(value, holders)
    missing = tuple(node for node in value.members if node not in {*here, *convicted})
    return Blocked(missing) if missing and not _withheld(value, top, heard) else Fresh()


def _withheld(value: Value, top: Collection[Ready], readies: Collection[Ready]) -> bool:
    """Whether a member of the attempt that computed `value` is here, did not vote for it, and never will."""
    voters = {ready.node for ready in top}
    computed = all(order(vote.voted_in) == order(value.origin) for vote in top)
    return computed and any(ready.node in value.members and ready.node not in voters for ready in readies)


def choose_group(readies: Mapping[str, Ready], accusers: Collection[str] | None = None) -> frozenset[str]:
    """The members of the next attempt: all that are ready, except those that others lost or refused.

    While any suspicion between chosen members is left, the member in most of them goes, as accuser or as suspect. Among
    equals, the first to go is one that brings no tokens, then the one suspected most often, then the highest node id.

    Args:
        accusers: nodes whose suspicions count; None counts everyone's.
    """
    group = set(readies)
    while True:
        heard = group if accusers is None else group & {*accusers}
        pairs = [(accuser, node) for accuser in heard for node in readies[accuser].suspects if node in group]
        if not pairs:
            return frozenset(group)
        named = Counter(node for pair in pairs for node in pair)
        suspected = Counter(node for _, node in pairs)
        group.remove(max(named, key=lambda node: (named[node], not readies[node].tokens, suspected[node], node)))
