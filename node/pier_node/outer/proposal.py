"""A member takes nobody's word: may this proposal end in a commit, and does its keeper know what we know? Pure."""

from __future__ import annotations

from collections.abc import Collection

from pier.v1.peer_pb2 import Proposal, Ready, Share
from pier_node.outer.quorum import has_quorum, order


def flaw(proposal: Proposal, ready: Ready, base: Collection[str], length: int) -> str:
    """Why a member must not take part, in words; empty when it may.

    Args:
        ready: what the member announced; the proposal must rest on exactly that.
        base: members of the last committed round.
        length: parameters.
    """
    group = [share.node for share in proposal.shares]
    mine = [share for share in proposal.shares if share.node == ready.node]
    if proposal.round != ready.round:
        return "another round"
    if order(proposal.ballot) <= order(ready.seen):
        return "an old ballot"
    if group != sorted(set(group)):
        return "members out of order"
    if not mine or mine[0].nonce != ready.nonce:
        return "stale"
    if (mine[0].tokens, mine[0].norm) != (ready.tokens, ready.norm):
        return "other tokens, or another norm, than were announced"
    if not has_quorum({vote for share in proposal.shares for vote in share.votes}, base):
        return "no quorum"
    return "" if _covers(proposal.shares, length) else "shards do not cover the vector"


def _covers(shares: Collection[Share], length: int) -> bool:
    done = 0
    for share in shares:
        if share.offset != done:
            return False
        done += share.length
    return done == length
