"""Signatures: a node signs with its key whatever it says that others pass on, or keep as proof.

What is signed is `pier <purpose>`, the hash of the run's configuration and the statement's bytes, so a signature made
for one purpose or run is worth nothing in another. A node id is the hash of the public key (node.py). So a signature
travels with its key, and the reader needs no directory of keys.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.node import Identity, node_id

KNOWN = 1 << 14
"""Number of valid signatures that are remembered, by hash: a leader shows the same ones to everyone."""

_ALGORITHM = ec.ECDSA(hashes.SHA256())
_known: set[bytes] = set()


@dataclass(frozen=True)
class Signer:
    """Signs in the name of one node, for one run.

    Attributes:
        public: the node's public key (DER, SubjectPublicKeyInfo): 91 bytes.
    """

    identity: Identity
    run_hash: bytes

    @property
    def node(self) -> str:
        """The node whose signatures these are."""
        return self.identity.node

    @property
    def public(self) -> bytes:
        """The key that verifies the signatures."""
        key = self.identity.key.public_key()
        return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)

    def sign(self, purpose: str, statement: bytes) -> bytes:
        """The signature of a statement: ECDSA over P-256 and SHA-256, DER, at most 72 bytes."""
        return self.identity.key.sign(_signed(purpose, self.run_hash, statement), _ALGORITHM)

    def verifies(self, node: str, public: bytes, signature: bytes, purpose: str, statement: bytes) -> bool:
        """Whether a node with this id signed this statement, for this purpose and this run."""
        return is_signed(node, public, signature, purpose, self.run_hash, statement)


def is_signed(node: str, public: bytes, signature: bytes, purpose: str, run_hash: bytes, statement: bytes) -> bool:
    """Whether a node with this id signed this statement, for this purpose and this run."""
    message = _signed(purpose, run_hash, statement)
    name = hashlib.sha256(
        b"\0".join([node.encode(), public.hex().encode(), signature.hex().encode(), message])
    ).digest()
    if name in _known:
        return True
    try:
        key = _key(public)
        if node_id(key) != node:
            return False
        key.verify(signature, message, _ALGORITHM)
    except (ValueError, InvalidSignature):
        return False
    if len(_known) >= KNOWN:
        _known.clear()
    _known.add(name)
    return True


@lru_cache(maxsize=4096)
def _key(public: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(public)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("not a P-256 key")
    return key


def _signed(purpose: str, run_hash: bytes, statement: bytes) -> bytes:
    return b"\0".join([b"pier " + purpose.encode(), run_hash.hex().encode(), statement])
