"""Statements without keys, for sites whose names are no hashes; and proofs that lie in memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pier_node.rounds.proofs import PROOFS_FILE, Proofs
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import DoubleVote, Handover, Ready, Signed, Vote, Vouch

M = TypeVar("M", Ready, Vote, Handover, Vouch)


class PlainStatements(Statements):
    """Whoever says something signs with its name, and nobody else can."""

    def __init__(self, node: str, witness: str = "") -> None:
        self._node, self.witness = node, witness
        self.convicted = dict[str, DoubleVote]()

    def seal(self, message: Ready | Vote | Handover | Vouch) -> Signed:
        statement = message.SerializeToString(deterministic=True)
        return Signed(node=self._node, statement=statement, public=b"key", signature=_signature(self._node, statement))

    def read(self, kind: type[M], signed: Signed) -> M:
        message = kind.FromString(signed.statement)
        if signed.signature != _signature(signed.node, signed.statement) or message.node != signed.node:
            raise BadMessage(f"a {kind.__name__} that {message.node} has not signed")
        return message


def _signature(node: str, statement: bytes) -> bytes:
    return f"{node} {hash(statement):x}".encode()


class MemoryProofs(Proofs):
    """In a folder that goes with the test."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        super().__init__(Path(self._folder.name) / PROOFS_FILE)
