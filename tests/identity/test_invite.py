from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.invite import Invite, pin

KEY = ec.generate_private_key(ec.SECP256R1())


def test_both_ends_make_the_same_certificate() -> None:
    invite = Invite.new(KEY.public_key())
    pasted = Invite.parse(str(invite))
    assert pasted == invite
    assert pasted.certificate == invite.certificate
    assert pasted.pin == pin(KEY.public_key())


def test_a_certificate_is_of_its_invite_alone() -> None:
    one, other = Invite.new(KEY.public_key()), Invite.new(KEY.public_key())
    names = {x509.load_pem_x509_certificate(it.certificate).subject.rfc4514_string() for it in (one, other)}
    assert names == {f"CN=Pier invite {one.id}", f"CN=Pier invite {other.id}"}


def test_what_is_printed_of_an_invite_does_not_tell_its_secret() -> None:
    invite = Invite.new(KEY.public_key())
    assert invite.secret.hex() not in repr(invite)
    assert repr(invite.secret) not in repr(invite)
    assert invite.secret.hex()[:12] != invite.id
