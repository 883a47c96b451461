"""Statements: announcements, votes, handovers and vouches, signed by their nodes, so that nobody can forge one.

A leader shows every member the announcements of all of them, and a committed state comes with its votes (proofs.py).
Others can pass a statement on, but cannot change it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

from pier_node.identity.node import Signer
from pier_node.rounds.quorum import Base
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import DoubleVote, Handover, Ready, Signed, Vote, Vouch

M = TypeVar("M", Ready, Vote, Handover, Vouch)


class Statements(Protocol):
    """Makes this node's statements and reads those of others.

    Attributes:
        convicted: the nodes that have voted twice, each with the votes that prove it (double_votes.py).
        witness: the run's witness; "": it has none.
    """

    convicted: dict[str, DoubleVote]
    witness: str

    def seal(self, message: Ready | Vote | Handover | Vouch) -> Signed:
        """Sign a statement in this node's name."""

    def read(self, kind: type[M], signed: Signed) -> M:
        """What a node said. Raises BadMessage unless it is within bounds and signed by the node that it names."""

    def base(self, members: Collection[str]) -> Base:
        """Whose votes decide the round after one with these members."""
        return Base(members, self.convicted, self.witness)


class SignedStatements(Statements):
    """Statements for one run, signed with the keys of its nodes."""

    def __init__(self, signer: Signer, witness: str = "") -> None:
        self._signer, self.witness = signer, witness
        self.convicted = dict[str, DoubleVote]()

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
