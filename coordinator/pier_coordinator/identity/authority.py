"""The run's authority, whose key follows from the run's secret: it certifies sites, and signs who was revoked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.certificates import authority_key, issue
from pier_node.identity.node import Token, node_id
from pier_node.rounds import revocations
from pier_proto.v1.peer_pb2 import Revocations


@dataclass(frozen=True)
class Authority:
    """Of the run with that token and that hash of its configuration."""

    token: Token
    run_hash: bytes

    def certify(self, key: ec.EllipticCurvePublicKey) -> bytes:
        """A certificate for a site, PEM."""
        return issue(self.token, node_id(key), key)

    def revocations(self, version: int, nodes: Collection[str]) -> Revocations:
        """The signed list of revoked sites."""
        return revocations.signed(authority_key(self.token), self.run_hash, version, nodes)
