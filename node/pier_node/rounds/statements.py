"""Statements: announcements, votes, handovers and vouches, signed by their nodes, so that nobody can forge one.

A leader shows every member the announcements of all of them, and a committed state comes with its votes (proofs.py).
Others can pass a statement on, but cannot change it.

Handovers say who holds whose vote. Each member of a round has one vote, and a site that stops politely gives all votes
that it holds to an heir. Gifts are signed, numbered statements (Handover), so a vote can be followed from its owner:
the n-th time it comes to a site, it leaves with the n-th of that site's gifts that contains it. Where this path ends,
there the vote is, whether or not the last heir has heard of the gift. A group carries the votes whose last heir is in
it, because that heir shows all of its own gifts. So any two groups that carry the same vote share a member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from pier_node.identity.node import Signer
from pier_node.rounds.quorum import has_quorum
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Ready, Signed, Vote, Vouch

M = TypeVar("M", Ready, Vote, Handover, Vouch)


class Statements(Protocol):
    """Makes this node's statements and reads those of others.

    Attributes:
        convicted: nodes that have voted twice; quorum.py says how a quorum counts them.
    """

    convicted: set[str]

    def seal(self, message: Ready | Vote | Handover | Vouch) -> Signed:
        """Sign a statement in this node's name."""

    def read(self, kind: type[M], signed: Signed) -> M:
        """What a node said. Raises BadMessage unless it is within bounds and signed by the node that it names."""


class SignedStatements:
    """Statements for one run, signed with the keys of its nodes."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self.convicted = set[str]()

    def seal(self, message: Ready | Vote | Handover | Vouch) -> Signed:
        """See Statements."""
        statement, by = message.SerializeToString(deterministic=True), self._signer
        signature = by.sign(type(message).__name__, statement)
        return Signed(node=by.node, statement=statement, public=by.public, signature=signature)

    def read(self, kind: type[M], signed: Signed) -> M:
        """See Statements."""
        it = signed
        if not self._signer.verifies(it.node, it.public, it.signature, kind.__name__, it.statement):
            raise BadMessage(f"a {kind.__name__} that {it.node} has not signed for this run")
        message = parse(kind, it.statement)
        if message.node != it.node:
            raise BadMessage(f"a {kind.__name__} of {it.node} in the name of {message.node}")
        return message


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
