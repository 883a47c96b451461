"""Certificates: how a site proves to another that a state was committed, starting from a state that the other trusts.

A link consists of the votes of a whole group for one state. It follows from a trusted state if the group carried a
quorum of the votes of that state's members: then the group had at least one honest member, and an honest member votes
only on the basis of a committed state. So a chain needs a link only where members change, and one for the newest state.

The first state of a run has the signature of its founder alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pier_node.outer.state import OuterState
from pier_node.rounds.handovers import carried
from pier_node.rounds.quorum import has_quorum
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Ballot, Handover, Link, Vote


@dataclass(frozen=True)
class Trusted:
    """A state trusted to be committed. Before the first one: round -1, with the founder as its only member."""

    round: int
    digest: bytes
    members: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """What people pass on outside the run, so that a newcomer can start to trust from here."""
        said = json.dumps([self.round, self.digest.hex(), list(self.members)])
        return f"{self.round}-{hashlib.sha256(said.encode()).hexdigest()[:40]}"


def plan_name(base: bytes, ballot: Ballot, group: Sequence[str], members: Sequence[str]) -> bytes:
    """SHA-256 of what all votes of an attempt have in common besides round and digest."""
    fields = [base.hex(), ballot.number, ballot.leader, list(group), list(members)]
    return hashlib.sha256(json.dumps(fields).encode()).digest()


def follow(trusted: Trusted, link: Link, statements: Statements) -> Trusted:
    """The state that a link proves to a site that trusts that one. Raises BadMessage if it proves nothing."""
    if link.round <= trusted.round or (link.round == trusted.round + 1 and link.base != trusted.digest):
        raise BadMessage(f"a proof of round {link.round} that does not follow from round {trusted.round}")
    group = [signed.node for signed in link.votes]
    if group != sorted(set(group)):
        raise BadMessage("a proof whose votes are out of order")
    told = [*group, *(signed.node for signed in link.handovers)]
    base, convicted = trusted.members, statements.convicted
    if not has_quorum(told, base, convicted):  # before anything slow: anybody can send names
        raise BadMessage(f"a proof of round {link.round} without a majority of the members of round {trusted.round}")
    first = sorted(link.votes, key=lambda signed: signed.node not in trusted.members)
    read = {signed.node: statements.read(Vote, signed) for signed in first}
    votes = [read[node] for node in group]
    plan = plan_name(link.base, link.ballot, group, link.members)
    if any((it.round, it.digest, it.ballot, it.plan) != (link.round, link.digest, link.ballot, plan) for it in votes):
        raise BadMessage(f"a proof of round {link.round} with votes for something else")
    if not has_quorum(_carried(votes, link, statements), base, convicted):
        raise BadMessage(f"a proof of round {link.round} without a majority of the members of round {trusted.round}")
    return Trusted(link.round, bytes(link.digest), tuple(link.members))


def _carried(votes: Iterable[Vote], link: Link, statements: Statements) -> frozenset[str]:
    handovers = [statements.read(Handover, signed) for signed in link.handovers]
    relevant = [it for it in handovers if it.round + 1 == link.round and it.base == link.base]
    return carried([vote.node for vote in votes], relevant)


def alone(state: OuterState, base: bytes, statements: Statements) -> Link:
    """The proof of a state that a group of one commits; for a run's first state `base` is empty."""
    (node,) = state.members
    ballot = Ballot(number=1, leader=node)
    plan = plan_name(base, ballot, [node], [node])
    vote = Vote(node=node, round=state.round, ballot=ballot, digest=state.digest, plan=plan)
    signed = statements.seal(vote)
    return Link(round=state.round, digest=state.digest, base=base, ballot=ballot, members=[node], votes=[signed])


def essential(members: Sequence[Sequence[str]]) -> list[int]:
    """Indices of the links that a newcomer needs: the first, those at which members change, and the last two.

    The link of a round is on disk before its state is, so after a crash in between the last but one is needed.

    Args:
        members: members of the state of each link, in order of rounds.
    """
    last = len(members) - 2
    return [at for at, these in enumerate(members) if at == 0 or at >= last or these != members[at - 1]]
