"""The run's certificate authority: it certifies sites and signs the list of revoked sites.

Its key is derived from the run's secret.
"""

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
    """The authority of a run.

    Attributes:
        token: the run's secret.
        run_hash: the hash of the run's configuration.
    """

    token: Token
    run_hash: bytes

    def certify(self, key: ec.EllipticCurvePublicKey) -> bytes:
        """Issue a certificate (PEM) for a site's public key."""
        return issue(self.token, node_id(key), key)

    def revocations(self, version: int, nodes: Collection[str]) -> Revocations:
        """Sign the list of revoked sites."""
        return revocations.signed(authority_key(self.token), self.run_hash, version, nodes)
