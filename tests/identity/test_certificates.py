from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from pier_node.identity.certificates import (
    DOMAIN,
    Credentials,
    authority,
    check_issued,
    credentials,
    issue,
    node_id_of_certificate,
)
from pier_node.identity.node import Identity, Token, key_pem

TOKEN = Token(bytes(range(100, 132)), bytes(range(16)))
ALICE, BOB = (Identity(ec.derive_private_key(number, ec.SECP256R1())) for number in (1, 2))


def certificate(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def verify(trusting: Credentials, shown: Credentials, name: str) -> None:
    store = Store([certificate(trusting.ca_pem)])
    verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
    verifier.verify(certificate(shown.cert_pem), [])


def test_every_holder_of_the_token_makes_the_same_authority() -> None:
    alice, bob = credentials(ALICE, TOKEN), credentials(BOB, Token.parse(str(TOKEN)))
    assert alice.ca_pem == bob.ca_pem
    golden = "55fba6e0558a980c1f2b793115968512"
    assert hashlib.sha256(alice.ca_pem).hexdigest()[:32] == golden


@pytest.mark.parametrize(
    "other", [Token(bytes(32), TOKEN.run), Token(TOKEN.secret, bytes(16))], ids=["other secret", "other run"]
)
def test_another_token_makes_another_authority(other: Token) -> None:
    ours, theirs = credentials(ALICE, TOKEN), credentials(BOB, other)
    assert certificate(ours.ca_pem).public_key() != certificate(theirs.ca_pem).public_key()
    with pytest.raises(VerificationError):
        verify(ours, theirs, DOMAIN)


@pytest.mark.parametrize("name", [f"{BOB.node}.pier", "pier"])
def test_members_trust_each_other_by_name(name: str) -> None:
    verify(credentials(ALICE, TOKEN), credentials(BOB, TOKEN), name)
    if name != DOMAIN:
        with pytest.raises(VerificationError):
            verify(credentials(ALICE, TOKEN), credentials(ALICE, TOKEN), name)


def test_a_certificate_holds_for_both_ends_of_a_connection() -> None:
    shown = certificate(credentials(ALICE, TOKEN).cert_pem)
    usages = shown.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_clocks_may_differ_by_a_day() -> None:
    shown = certificate(credentials(ALICE, TOKEN).cert_pem)
    now = datetime.now(UTC)
    assert shown.not_valid_before_utc <= now - timedelta(hours=23)
    assert shown.not_valid_after_utc >= now + timedelta(days=3649)


def test_the_private_key_goes_along_but_is_not_shown() -> None:
    made = credentials(ALICE, TOKEN)
    assert made.key_pem == key_pem(ALICE.key)
    assert "PRIVATE" not in repr(made)


def test_a_certificate_tells_its_node() -> None:
    assert node_id_of_certificate(credentials(ALICE, TOKEN).cert_pem) == ALICE.node
    assert ALICE.node != BOB.node


class Impostor(Identity):
    """Holds the token, and writes another's name into its certificate."""

    @property
    def node(self) -> str:
        return BOB.node


def test_a_name_that_the_key_does_not_make_is_refused() -> None:
    forged = credentials(Impostor(ALICE.key), TOKEN)
    verify(credentials(ALICE, TOKEN), forged, f"{BOB.node}.pier")  # TLS alone would believe it
    with pytest.raises(ValueError, match=f"names another node than its key, which is of {ALICE.node}"):
        node_id_of_certificate(forged.cert_pem)


def self_signed(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "someone")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.not_valid_before(datetime(2020, 1, 1)).not_valid_after(datetime(2040, 1, 1)).serial_number(1)
    made = dated.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("pem", "problem"),
    [
        (b"", "PEM"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "pars"),
        (self_signed(ALICE.key), "names no node"),
        (self_signed(ec.generate_private_key(ec.SECP384R1())), "not of the kind P-256"),
        (self_signed(ed25519.Ed25519PrivateKey.generate()), "not of the kind P-256"),
    ],
    ids=["empty", "garbage", "no name", "P-384", "Ed25519"],
)
def test_other_certificates_have_no_node(pem: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        node_id_of_certificate(pem)


def test_a_node_that_was_given_a_certificate_makes_sure_that_it_is_its_own() -> None:
    check_issued(issue(TOKEN, ALICE.node, ALICE.key.public_key()), authority(TOKEN), ALICE)
    with pytest.raises(ValueError, match="another node's"):
        check_issued(issue(TOKEN, BOB.node, BOB.key.public_key()), authority(TOKEN), ALICE)
    other = Token(bytes(32), bytes(16))
    for authority_of in (other, Token(bytes(32), TOKEN.run)):
        with pytest.raises(ValueError, match="not signed by the run's authority"):
            check_issued(issue(TOKEN, ALICE.node, ALICE.key.public_key()), authority(authority_of), ALICE)
