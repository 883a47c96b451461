"""Who may decide a round, and what: the rules that keep two groups from committing different bits.

A round is one decision of Paxos (Lamport, "Paxos Made Simple", 2001) whose value is the digest of the next state.
A commit needs the vote of *every* member of a group that holds a majority of the last round's members. Two such groups
share a member, and that member tells the leader of the later attempt what it voted for in the earlier one; the later
attempt then finishes that result (adopts it) instead of computing another. docs/protocol.md has the argument in full.
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
    """This result may have been committed by somebody: finish it; `holders` have it."""

    value: Value
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Blocked:
    """A result may have been committed by sites that are not here: wait for one of `missing`."""

    missing: tuple[str, ...]


LEAP = 1 << 20
"""Ballots of a round that lie so far above what others have seen were not reached by attempts."""


def has_quorum(votes: Collection[str], base: Collection[str], convicted: Collection[str] = ()) -> bool:
    """Whether a group may decide: it carries the votes of a majority of the last round's members.

    Every member has one vote, and whoever stops politely hands its votes to one other: a vote is in one hand at a time,
    so that two groups cannot both have most of them. Of an even split, the side with the vote of the lowest node id
    goes on, so that of two sites one may survive the other.

    Args:
        convicted: nodes that have voted twice (double_votes.py). A majority of the others is a quorum too: with the
            vote of one of these, who vote on any side, it would be one anyway; and two such quorums share a member.
    """
    honest = {*base} - {*convicted}
    return _has_most(votes, base) or (len(honest) < len(base) and _has_most(votes, honest))


def _has_most(votes: Collection[str], base: Collection[str]) -> bool:
    present = set(votes) & set(base)
    return 2 * len(present) > len(base) or (2 * len(present) == len(base) and min(base, default="") in present)


def leader_of(nodes: Collection[str], base: Collection[str]) -> str:
    """Who keeps the coming round: the lowest of the last round's members among these nodes, if any, else the lowest.

    A site that has just come cannot put itself in front of all others.
    """
    return min({*nodes} & {*base} or nodes, default="")


def order(ballot: Ballot) -> tuple[int, str]:
    """Ballots are ordered by number, then by leader. No site ever takes part in one that is not above all before."""
    return ballot.number, ballot.leader


def next_ballot(readies: Iterable[Ready], leader: str) -> Ballot:
    """A ballot above every one that the group has taken part in."""
    return Ballot(number=1 + max((ready.seen.number for ready in readies), default=0), leader=leader)


def choose_value(
    readies: Collection[Ready], voters: Collection[str] | None = None, convicted: Collection[str] = ()
) -> Fresh | Adopt | Blocked:
    """What an attempt of exactly these members must do.

    Args:
        voters: whose word about votes counts: members of the last round, and the heirs of their votes. Two quorums
            share one of them, so that nobody else is needed. None: that of all.
        convicted: nodes that have voted twice: nobody waits for a result that only they may have.

    Only the newest vote counts (Paxos). It is finished if anybody here holds its result. If nobody here does (its
    voters were restarted), it is void once it is sure that nobody can have committed it: one of its members is here and
    never voted for it, or all of them are here. A vote that another member contradicted in the attempt that computed
    its result is void too: its voter saw that not all were for it.
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
    """Whether a member of the attempt that computed `value` is here, did not vote for it, and now never will."""
    voters = {ready.node for ready in top}
    computed = all(order(vote.voted_in) == order(value.origin) for vote in top)
    return computed and any(ready.node in value.members and ready.node not in voters for ready in readies)


def choose_group(readies: Mapping[str, Ready], accusers: Collection[str] | None = None) -> frozenset[str]:
    """The members of the next attempt: all that are ready, less those that others lost or refused.

    While a suspicion is left among the chosen, whoever is in most of them goes; of equals, who brings nothing rather
    than who brings tokens, the suspected rather than the suspecting, then the highest node id.

    Args:
        accusers: whose suspicions count; None: those of all.
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
