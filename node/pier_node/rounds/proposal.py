"""A member's check of a proposal: may it end in a commit, and does it follow from the members' announcements?

A member trusts nobody's word. The proposal carries the signed announcements of its members, and each member repeats the
leader's decision. The check is pure, except for signatures, which are checked before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pier_node.rounds.quorum import LEAP, Adopt, Blocked, choose_value, has_quorum, next_ballot, order
from pier_node.rounds.statements import carried, holders
from pier_proto.v1.peer_pb2 import Handover, Proposal, Ready, Share


@dataclass(frozen=True)
class Announcement:
    """A member's announcement with the handovers that it rests on; all their signatures have been checked."""

    ready: Ready
    handovers: Sequence[Handover] = ()


@dataclass(frozen=True)
class Base:
    """Members of the last committed round, and the nodes that have voted twice."""

    members: Collection[str]
    convicted: Collection[str] = ()


def votes_of(announced: Mapping[str, Announcement]) -> frozenset[str]:
    """The votes of the last round's members that a group carries."""
    return carried(announced, _shown(announced))


def voters_of(announced: Mapping[str, Announcement], base: Collection[str]) -> frozenset[str]:
    """Nodes whose word about earlier votes counts: members of the last round, and holders of their votes."""
    return frozenset({*base, *holders(base, _shown(announced)).values()} & {*announced})


def _shown(announced: Mapping[str, Announcement]) -> list[Handover]:
    return [
        it
        for by in announced.values()
        for it in by.handovers
        if (it.round + 1, it.base) == (by.ready.round, by.ready.base)
    ]


def flaw(proposal: Proposal, mine: Ready, announced: Mapping[str, Announcement], base: Base, length: int) -> str:
    """Why a member must not take part, in words; empty if it may.

    Args:
        mine: what the member announced; the proposal must rest on exactly that.
        announced: announcements of the proposal's members.
        base: the members whose votes a quorum needs.
        length: number of parameters.
    """
    group = [share.node for share in proposal.shares]
    if proposal.round != mine.round:
        return "another round"
    if order(proposal.ballot) <= order(mine.seen):
        return "an old ballot"
    if group != sorted(set(group)) or group != [*announced]:
        return "members out of order"
    if mine.node not in announced or announced[mine.node].ready.nonce != mine.nonce:
        return "stale"
    return _flaw_of_group(proposal, mine, announced, base) or _flaw_of_shares(proposal, announced, length)


def _flaw_of_group(proposal: Proposal, mine: Ready, announced: Mapping[str, Announcement], base: Base) -> str:
    readies = [it.ready for it in announced.values()]
    if any((ready.round, ready.base) != (mine.round, mine.base) for ready in readies):
        return "members at another state"
    if not has_quorum(votes_of(announced), base.members, base.convicted):
        return "no quorum"
    leader = proposal.ballot.leader
    if leader not in base.members and not {*base.members}.isdisjoint(announced):
        return "a leader that was no member of the last round, though members are here"
    if proposal.ballot != next_ballot(readies, leader):
        return "a ballot that does not follow"
    if proposal.ballot.number > mine.seen.number + LEAP:
        return "a ballot far above all that this site has seen"
    decision = choose_value(readies, voters_of(announced, base.members), base.convicted)
    if isinstance(decision, Blocked):
        return "a result may have been committed by others"
    adopts = decision.value if isinstance(decision, Adopt) else None
    told = proposal.adopt if proposal.HasField("adopt") else None
    return "" if told == adopts else "another result than the announcements ask for"


def _flaw_of_shares(proposal: Proposal, announced: Mapping[str, Announcement], length: int) -> str:
    for share in proposal.shares:
        ready = announced[share.node].ready
        if (share.tokens, share.norm) != (ready.tokens, ready.norm):
            return "other tokens, or another norm, than were announced"
    return "" if _covers(proposal.shares, length) else "shards do not cover the vector"


def _covers(shares: Collection[Share], length: int) -> bool:
    done = 0
    for share in shares:
        if share.offset != done:
            return False
        done += share.length
    return done == length
