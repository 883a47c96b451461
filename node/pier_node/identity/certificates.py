"""Certificates: how two nodes of a run prove to each other that they belong to it, and which nodes they are.

A holder of the run's token derives the run's certificate authority from it (HKDF, RFC 5869; deterministic ECDSA, RFC
6979) and certifies itself. So nobody has to be asked, and a site can join without the help of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pier_node.identity.node import Identity, Token, key_pem, node_id

DOMAIN = "pier"
"""The name of every node of a run in its certificate, besides its own name `<node id>.pier`."""

_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
_BEGINNING = datetime(2000, 1, 1)
_NEVER = datetime(9999, 12, 31, 23, 59, 59)
"""The end date that RFC 5280, 4.1.2.5 prescribes for a certificate that does not expire."""
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True)
class Credentials:
    """PEM texts with which a node proves that it belongs to a run, and which node it is."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def key(self) -> ec.EllipticCurvePrivateKey:
        """The node's private key."""
        key = serialization.load_pem_private_key(self.key_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key


def credentials(identity: Identity, token: Token) -> Credentials:
    """Certify a node for a run. Its clock may be wrong by a day."""
    return Credentials(authority(token), issue(token, identity.node, identity.key.public_key()), key_pem(identity.key))


def authority(token: Token) -> bytes:
    """The certificate of a run's authority, PEM."""
    return pem(_authority(token)[1])


def authority_key(token: Token) -> ec.EllipticCurvePrivateKey:
    """The key of a run's authority."""
    return _authority(token)[0]


def issue(token: Token, node: str, key: ec.EllipticCurvePublicKey) -> bytes:
    """A certificate for a node with this id and key, PEM; valid from one day ago, since clocks differ."""
    ca_key, ca = _authority(token)
    now = datetime.now(UTC)
    names = [x509.DNSName(f"{node}.{DOMAIN}"), x509.DNSName(DOMAIN)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _certificate(key, node, ca.subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return pem(certificate)


def check_issued(certificate_pem: bytes, authority_pem: bytes, identity: Identity) -> None:
    """Check that a certificate belongs to this node and was signed by that authority. Raises ValueError."""
    if node_id_of_certificate(certificate_pem) != identity.node:
        raise ValueError("the certificate is another node's")
    try:
        certificate, issuer = (x509.load_pem_x509_certificate(it) for it in (certificate_pem, authority_pem))
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ValueError("the certificate is not signed by the run's authority") from error


@lru_cache(maxsize=2048)
def certified_key(authority_pem: bytes, certificate_pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key that the run's authority certified. Raises ValueError if it did not, or not for this time."""
    shown = x509.load_pem_x509_certificate(certificate_pem)
    try:
        shown.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
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


def self_signed(key: ec.EllipticCurvePrivateKey, subject: str) -> bytes:
    """A certificate that proves only its key, PEM; the same key and subject give the same bytes."""
    return pem(_self_signed(key, subject, (x509.BasicConstraints(ca=False, path_length=None), True)))


def derived_key(secret: bytes, salt: bytes, purpose: bytes) -> ec.EllipticCurvePrivateKey:
    """A private key that everyone who knows the secret can derive (HKDF, RFC 5869)."""
    # Using 16 bytes more than the order has makes the bias of the remainder negligible (FIPS 186-5, A.2.1).
    wide = HKDF(hashes.SHA256(), length=48, salt=salt, info=purpose)
    scalar = int.from_bytes(wide.derive(secret)) % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(scalar, ec.SECP256R1())


@lru_cache(maxsize=2048)
def node_id_of_certificate(pem: bytes) -> str:
    """The node id of a certificate's key.

    Raises:
        ValueError: it is not a certificate, has another kind of key, or names a node other than its key's.
    """
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        key = certificate.public_key()
    except UnsupportedAlgorithm as error:
        raise ValueError(f"the certificate's key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the certificate's key is not of the kind P-256")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise ValueError("the certificate names no node") from error
    node = node_id(key)
    if f"{node}.{DOMAIN}" not in names.get_values_for_type(x509.DNSName):
        raise ValueError(f"the certificate names another node than its key, which is of {node}")
    return node


def _authority(token: Token) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The run's authority: every holder of a token derives the same key and, byte for byte, the same certificate."""
    key = derived_key(token.secret, token.run, b"pier run certificate authority")
    certificate = _self_signed(
        key,
        f"Pier run {token.run.hex()}",
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_SIGNS_CERTIFICATES, True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    )
    return key, certificate


def _self_signed(
    key: ec.EllipticCurvePrivateKey, subject: str, *extensions: tuple[x509.ExtensionType, bool]
) -> x509.Certificate:
    """A certificate that lasts for ever, with these extensions, each of them critical or not."""
    builder = _certificate(key.public_key(), subject, _name(subject)).serial_number(1)
    builder = builder.not_valid_before(_BEGINNING).not_valid_after(_NEVER)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True)


def _certificate(key: ec.EllipticCurvePublicKey, subject: str, issuer: x509.Name) -> x509.CertificateBuilder:
    return x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(issuer).public_key(key)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate, PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)
