"""Hands: in whose hand the votes of a round's members are, as their signed statements prove it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pier.v1.peer_pb2 import Handover


def proven_votes(node: str, claimed: Collection[str], handovers: Iterable[Handover]) -> frozenset[str]:
    """Of the votes that a node claims to hold, those that are its own or were handed to it, through however many hands.

    Args:
        handovers: whose signatures were checked, for the round in question.
    """
    given: dict[str, set[tuple[str, str]]] = {}
    for it in handovers:
        for vote in it.votes:
            given.setdefault(vote, set()).add((it.node, it.heir))
    return frozenset(vote for vote in claimed if vote == node or _reaches(vote, node, given.get(vote, set())))


def _reaches(vote: str, node: str, hands: Collection[tuple[str, str]]) -> bool:
    """Whether the vote, which its owner holds first, can have come into the node's hand."""
    reached, frontier = {vote}, [vote]
    while frontier:
        giver = frontier.pop()
        for heir in {heir for by, heir in hands if by == giver} - reached:
            reached.add(heir)
            frontier.append(heir)
    return node in reached
