"""Call metadata: who calls, in which run, and the proof of who answers. It travels with every call.

TLS alone shows that both ends hold the run's token; their keys show which of its holders they are. The caller's key is
in its certificate. The node that answers signs the caller's nonce and id, for two reasons: a certificate's name is
worth nothing where everybody can issue certificates, and the caller's library does not show it the other end's key.
Without TLS the names are taken as given: --insecure is for networks where everyone is trusted.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.certificates import node_id_of_certificate
from pier_node.identity.node import node_id
from pier_node.wire.carrier import HELLO, PROTOCOL
from pier_node.wire.rules import NODE_ID

Headers = Mapping[str, str | bytes]

PROTOCOL_KEY, RUN, FROM, TO = "pier-protocol", "pier-run", "pier-node", "pier-to"
NONCE, PROOF = "pier-nonce-bin", "pier-proof-bin"

_ALGORITHM = ec.ECDSA(hashes.SHA256())
_POINT_BYTES = 65
"""Length in bytes of a P-256 public key as an uncompressed point (SEC 1)."""


class NotAdmitted(Exception):
    """A call that is refused before its message is read; the text goes back to the caller."""


@dataclass(frozen=True)
class CallMetadata:
    """A node's own metadata.

    Attributes:
        run_hash: hash of the run's configuration; empty while it is not known, when only Hello can be asked.
        key: signs this node's answers; None without TLS.
        put_out: nodes that have a certificate but no longer belong to the run, and why, in words.
    """

    node: str
    run_hash: bytes
    key: ec.EllipticCurvePrivateKey | None = None
    put_out: dict[str, str] = field(default_factory=dict)

    def call(self, to: str | None) -> dict[str, str | bytes]:
        """Headers of a call to a node; None calls whichever node listens there."""
        headers: dict[str, str | bytes] = {
            PROTOCOL_KEY: str(PROTOCOL),
            RUN: self.run_hash.hex(),
            FROM: self.node,
            NONCE: secrets.token_bytes(16),
        }
        return {**headers, TO: to} if to else headers

    def admit(self, method: str, headers: Headers, certificate: bytes | None) -> str:
        """The node id of a caller, from its certificate under TLS. Raises NotAdmitted."""
        self._check_protocol(headers.get(PROTOCOL_KEY))
        caller = self._caller(headers, certificate)
        if caller in self.put_out:
            raise NotAdmitted(f"node {caller} {self.put_out[caller]}")
        if (to := headers.get(TO, self.node)) != self.node:
            raise NotAdmitted(f"node {self.node} answers here, not {to!a}: two sites advertise one address")
        run = headers.get(RUN, "")
        if run != self.run_hash.hex() and not (method == HELLO.name and run == ""):
            raise NotAdmitted(f"this is run {self.run_hash.hex()[:8]}, the caller is in run {ascii(run)[1:9]}")
        return caller

    def answer(self, caller: str, headers: Headers) -> dict[str, str | bytes]:
        """Headers of the answer to an admitted call."""
        nonce = headers.get(NONCE)
        if self.key is None or not isinstance(nonce, bytes):
            return {FROM: self.node}
        point = self.key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        return {FROM: self.node, PROOF: point + self.key.sign(_signed(caller, nonce), _ALGORITHM)}

    def answered(self, asked: Headers, answer: Headers) -> str:
        """The node id of the node that answered our call. Raises ValueError if the answer does not prove it."""
        if self.key is None:
            return str(answer.get(FROM, ""))
        proof, nonce = answer.get(PROOF, b""), asked[NONCE]
        assert isinstance(proof, bytes)
        assert isinstance(nonce, bytes)
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), proof[:_POINT_BYTES])
        try:
            key.verify(proof[_POINT_BYTES:], _signed(self.node, nonce), _ALGORITHM)
        except InvalidSignature as error:
            raise ValueError("the signature is wrong") from error
        if (node := node_id(key)) in self.put_out:
            raise ValueError(f"node {node} {self.put_out[node]}")
        return node

    def _check_protocol(self, spoken: str | bytes | None) -> None:
        if spoken != str(PROTOCOL):
            theirs = ascii(spoken) if spoken else "none"
            raise NotAdmitted(f"this node speaks protocol {PROTOCOL}, the caller {theirs}: install one version of Pier")

    def _caller(self, headers: Headers, certificate: bytes | None) -> str:
        claimed = headers.get(FROM, "")
        if self.key is None:
            if not isinstance(claimed, str) or not NODE_ID.fullmatch(claimed):
                raise NotAdmitted(f"{FROM} must be the caller's node id")
            return claimed
        if certificate is None:
            raise NotAdmitted("the call came without a certificate")
        try:
            proven = node_id_of_certificate(certificate)
        except ValueError as error:
            raise NotAdmitted(str(error)) from error
        if claimed != proven:
            raise NotAdmitted(f"the caller says it is {claimed!a}, its certificate is of {proven}")
        return proven


def _signed(caller: str, nonce: bytes) -> bytes:
    """The bytes whose signature proves who answers. TLS proved the caller's id in them: no third node can reuse it."""
    return b"pier answer\0" + caller.encode() + nonce
