"""Passports: which node a libp2p peer is.

libp2p proves that the other end of a connection holds the key of its peer id, and nothing else. A passport binds that
peer id to a node: the node's certificate, which only a holder of the run's token can issue, and a signature of the peer
id by the key in it. To anybody but that peer it is worth nothing, so it may be shown to all.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from pier.v1.stream_pb2 import Passport
from pier_node.certificates import Credentials, node_id_of_certificate

_ALGORITHM = ec.ECDSA(hashes.SHA256())


def issue(node: str, credentials: Credentials | None, peer: bytes) -> Passport:
    """A node's passport for its libp2p peer id; without credentials it only says a name."""
    if credentials is None:
        return Passport(node=node)
    proof = credentials.key.sign(_signed(peer), _ALGORITHM)
    return Passport(node=node, certificate=credentials.cert_pem, proof=proof)


@lru_cache(maxsize=2048)
def bearer(ca: bytes, certificate: bytes, proof: bytes, peer: bytes) -> str:
    """The node id of a libp2p peer that shows this.

    Args:
        ca: certificate of the run's authority (PEM).

    Raises:
        ValueError: the passport is of another run, another node or another peer, forged, or not valid now.
    """
    node = node_id_of_certificate(certificate)
    try:
        certified(ca, certificate).verify(proof, _signed(peer), _ALGORITHM)
    except InvalidSignature as error:
        raise ValueError("its passport is of another libp2p peer") from error
    return node


@lru_cache(maxsize=2048)
def certified(ca: bytes, certificate: bytes) -> ec.EllipticCurvePublicKey:
    """The key that the run's authority certified (both PEM). Raises ValueError: it did not, or not for now."""
    shown = x509.load_pem_x509_certificate(certificate)
    try:
        shown.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ValueError("its certificate is of another run: the tokens differ") from error
    now = datetime.now(UTC)
    if now < shown.not_valid_before_utc:
        raise ValueError("its certificate is not valid yet: the clocks of the two sites differ by more than a day")
    if now > shown.not_valid_after_utc:
        raise ValueError("its certificate has expired: set the clock there, or restart that node")
    key = shown.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the certificate's key is not of the kind P-256")
    return key


def _signed(peer: bytes) -> bytes:
    return b"pier passport\0" + peer
