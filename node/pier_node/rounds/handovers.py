"""Handovers: who holds whose vote. Pure.

Each member of a round has one vote, and a site that stops politely gives all votes that it holds to an heir. Gifts are
signed, numbered statements (Handover), so a vote can be followed from its owner: the n-th time it comes to a site, it
leaves with the n-th of that site's gifts that contains it. Where this path ends, there the vote is, whether or not the
last heir has heard of the gift. A group carries the votes whose last heir is in it, because that heir shows all of its
own gifts. So any two groups that carry the same vote share a member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from pier_node.rounds.quorum import has_quorum
from pier_proto.v1.peer_pb2 import Handover


def carried(group: Collection[str], handovers: Iterable[Handover]) -> frozenset[str]:
    """The votes that a group carries.

    Args:
        handovers: those that its members show for the round in question; each member shows all of its own gifts, and
            those by which it got votes. Their signatures have been checked.
    """
    told = list(handovers)
    votes = {*group, *(vote for it in told for vote in it.votes)}
    return frozenset(vote for vote, holder in holders(votes, told).items() if holder in group)


def holders(votes: Iterable[str], handovers: Iterable[Handover]) -> dict[str, str]:
    """The holder of each of these votes, as far as the handovers tell."""
    gifts = _by_giver(handovers)
    return {vote: _holder(vote, gifts) for vote in votes}


def received(handovers: Iterable[Handover], gift: Handover) -> frozenset[str]:
    """Those votes of a gift that reached its heir by this gift.

    Args:
        handovers: those that the giver shows, this gift among them.
    """
    gifts = _by_giver(handovers)
    return frozenset(vote for vote in gift.votes if _holder(vote, gifts) == gift.heir)


def needed(group: Collection[str], base: Collection[str], handovers: Iterable[Handover]) -> list[Handover]:
    """The few handovers that show a group's quorum, if it has one; members could make up any number of others.

    Args:
        base: members of the last committed round.
        handovers: as for `carried`.
    """
    told = list(handovers)
    gifts, shown = _by_giver(told), dict[bytes, Handover]()
    ways = sorted((way for vote in {*base} - {*group} if (way := _way(vote, gifts)) and way[-1].heir in group), key=len)
    for way in [[], *ways]:
        shown |= {it.SerializeToString(): it for it in way}
        if has_quorum(carried(group, shown.values()), base):
            return list(shown.values())
    return told


def _by_giver(handovers: Iterable[Handover]) -> dict[str, list[Handover]]:
    gifts: dict[str, dict[int, Handover]] = {}
    for it in handovers:
        gifts.setdefault(it.node, {})[it.number] = it
    return {node: [given[number] for number in sorted(given)] for node, given in gifts.items()}


def _holder(vote: str, gifts: Mapping[str, Sequence[Handover]]) -> str:
    """The site where a vote's path ends."""
    way = _way(vote, gifts)
    return way[-1].heir if way else vote


def _way(vote: str, gifts: Mapping[str, Sequence[Handover]]) -> list[Handover]:
    """The gifts by which a vote went from hand to hand."""
    node, visits, way = vote, Counter[str](), list[Handover]()
    while True:
        leaves = [it for it in gifts.get(node, ()) if vote in it.votes]
        if visits[node] == len(leaves):
            return way
        way.append(leaves[visits[node]])
        visits[node] += 1
        node = way[-1].heir
