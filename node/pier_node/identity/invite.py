"""Invites: an operator gives one to a site so that the coordinator certifies it. The site never gets the run's secret.

Both ends derive a key pair from the invite's secret. Its certificate lets the site call the coordinator once. The rest
of the invite identifies the coordinator's key, since the site does not know any authority yet.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity import node
from pier_node.identity.certificates import derived_key, self_signed

PREFIX = "pierinvite1-"
_SECRET, _PIN = 16, 16


@dataclass(frozen=True)
class Invite:
    """One invite.

    Attributes:
        pin: fingerprint of the coordinator's key.
    """

    secret: bytes = field(repr=False)
    pin: bytes

    @classmethod
    def new(cls, coordinator: ec.EllipticCurvePublicKey) -> Self:
        """A new invite of the coordinator with this key."""
        return cls(secrets.token_bytes(_SECRET), pin(coordinator))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse pasted text. Raises PierError."""
        body = node.read(PREFIX, _SECRET + _PIN, text)
        return cls(body[:_SECRET], body[_SECRET:])

    def __str__(self) -> str:
        return node.spell(PREFIX, self.secret + self.pin)

    @property
    def id(self) -> str:
        """The invite's name wherever its secret must not be seen."""
        return hashlib.sha256(b"pier invite id" + self.secret).hexdigest()[:12]

    @cached_property
    def key(self) -> ec.EllipticCurvePrivateKey:
        """The key pair of the invite's holder."""
        return derived_key(self.secret, self.pin, b"pier invite")

    @cached_property
    def certificate(self) -> bytes:
        """The certificate of that key, PEM: all that the coordinator keeps of an invite."""
        return self_signed(self.key, f"Pier invite {self.id}")


def pin(key: ec.EllipticCurvePublicKey) -> bytes:
    """The fingerprint of a public key: the first 16 bytes of the SHA-256 of its DER form."""
    return hashlib.sha256(node.public_der(key)).digest()[:_PIN]
