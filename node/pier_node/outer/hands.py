"""Hands: in whose hand the votes of a round's members are. Pure.

Each member has one vote, and whoever stops politely gives the votes in its hand to an heir. The answer may get lost, so
that nobody knows whether the heir has them. Such a vote counts where the giver and the heir come together, and the heir
has not given it on: whoever else could count it needs the heir too, so that two groups that both count it share a
member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pier.v1.peer_pb2 import Handover


@dataclass(frozen=True)
class Hand:
    """What a node says of votes.

    Attributes:
        votes: that it holds.
        given: vote -> heir, of those that it gave away.
    """

    votes: frozenset[str]
    given: Mapping[str, str] = field(default_factory=dict)


def carried(hands: Mapping[str, Hand]) -> frozenset[str]:
    """The votes that a group carries, by what its members say."""
    votes = {vote for hand in hands.values() for vote in hand.votes}
    for giver, hand in hands.items():
        votes |= {vote for vote in hand.given if vote not in votes and _ends_here(vote, giver, hands)}
    return frozenset(votes)


def _ends_here(vote: str, giver: str, hands: Mapping[str, Hand]) -> bool:
    """Whether the last one that the vote was given to is in the group, and has not heard of it."""
    passed = set[str]()
    while giver in hands and giver not in passed:
        passed.add(giver)
        if vote not in hands[giver].given:
            return True
        giver = hands[giver].given[vote]
    return False


def proven_hand(node: str, claimed: Collection[str], handovers: Iterable[Handover]) -> Hand:
    """What a node may say that it holds: its own vote, and those that were handed to it, through however many hands.

    Args:
        handovers: all that it shows, for the round in question; their signatures were checked.
    """
    ways: dict[str, set[tuple[str, str]]] = {}
    for it in handovers:
        for vote in it.votes:
            ways.setdefault(vote, set()).add((it.node, it.heir))
    proven = frozenset(vote for vote in claimed if vote == node or _reaches(vote, node, ways.get(vote, set())))
    given = {
        vote: heir
        for vote, steps in ways.items()
        for by, heir in steps
        if by == node and vote not in proven and (vote == node or _reaches(vote, node, steps))
    }
    return Hand(proven, given)


def _reaches(vote: str, node: str, ways: Collection[tuple[str, str]]) -> bool:
    """Whether the vote, which its owner holds first, can have come into the node's hand."""
    reached, frontier = {vote}, [vote]
    while frontier:
        giver = frontier.pop()
        for heir in {heir for by, heir in ways if by == giver} - reached:
            reached.add(heir)
            frontier.append(heir)
    return node in reached
