"""A node's identity, and what it needs to join a run: its key pair and the run's token, kept in its data directory.

A node's id is the hash of its public key, so that nobody can claim another node's. The token is the run's one secret:
certificates.py derives everything else from it. Secrets have a text form that people can paste: a prefix, base32 in
lower case, and check digits against typos.

A node signs with its key whatever it says that others pass on, or keep as proof. What is signed is `pier <purpose>`,
the hash of the run's configuration and the statement's bytes, so a signature made for one purpose or run is worth
nothing in another. A signature travels with its key, so the reader needs no directory of keys.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.base import durable
from pier_node.base.errors import PierError

TOKEN_VARIABLE = "PIER_TOKEN"
"""Environment variable that passes a token or an invite to a command: unlike argv, other users cannot see it."""
CHECK = 4
"""Number of bytes of check digits."""


def spell(prefix: str, body: bytes) -> str:
    """The text form of a secret."""
    return prefix + base64.b32encode(body + _checksum(prefix, body)).decode().rstrip("=").lower()


def read(prefix: str, length: int, text: str) -> bytes:
    """Parse a secret of `length` bytes from typed or pasted text; case and line breaks do not matter.

    Raises:
        PierError: the text is not such a secret, or is incomplete.
    """
    compact = "".join(text.split()).lower()
    letters = len(prefix) + -(-(length + CHECK) * 8 // 5)
    if not compact.startswith(prefix):
        raise _mistyped(f"a token starts with {prefix}", prefix)
    if len(compact) != letters:
        raise _mistyped(f"it has {len(compact)} characters, a token has {letters}", prefix)
    try:
        padding = "=" * (-len(compact.removeprefix(prefix)) % 8)
        raw = base64.b32decode(compact.removeprefix(prefix).upper() + padding)
    except ValueError as error:
        raise _mistyped(f"after {prefix} only letters and the digits 2 to 7 occur in a token", prefix) from error
    body = raw[:length]
    if spell(prefix, body) != compact:
        raise _mistyped("its check digits do not match the rest", prefix)
    return body


def _checksum(prefix: str, body: bytes) -> bytes:
    return hashlib.sha256(prefix.encode() + body).digest()[:CHECK]


def _mistyped(why: str, prefix: str) -> PierError:
    return PierError(
        f"this is not a whole token: {why}", f"Copy the token again, from `{prefix}` to its last character."
    )


_PREFIX = "pier1-"
_PREFIX_WITH_FOUNDER = "pier2-"
_SECRET, _RUN, _FOUNDER = 32, 16, 8
_KEY_FILE, _TOKEN_FILE = "node.key", "run.token"


@dataclass(frozen=True)
class Identity:
    """A node's key pair."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def node(self) -> str:
        """The node id: 16 hex digits."""
        return node_id(self.key.public_key())

    @classmethod
    def new(cls) -> Self:
        """An identity that nobody has had before."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The identity kept in a data directory; None if there is none. Raises PierError."""
        path = folder / _KEY_FILE
        try:
            return cls(_load_key(path)) if path.exists() else None
        except OSError as error:
            raise durable.forbidden(path, error) from error

    @classmethod
    def load_or_create(cls, folder: Path) -> Self:
        """The identity kept in a data directory; created at the first start. Raises PierError."""
        if kept := cls.load(folder):
            return kept
        path, identity = folder / _KEY_FILE, cls.new()
        try:
            write_private(path, key_pem(identity.key))
        except OSError as error:
            raise durable.unwritable(f"cannot write {path}", error) from error
        return identity


@dataclass(frozen=True)
class Token:
    """What a site needs to join a run: the run's secret, the run it is for, and the founder to trust.

    Attributes:
        run: the first 16 bytes of the hash of the run's configuration.
        founder: node id of the site that began the run, which signed the run's first state; empty in tokens of earlier
            versions, which do not name it.
    """

    secret: bytes = field(repr=False)
    run: bytes
    founder: str = ""

    @classmethod
    def new(cls, run_hash: bytes, founder: str = "") -> Self:
        """A token for a run that starts now."""
        return cls(secrets.token_bytes(_SECRET), run_hash[:_RUN], founder)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse typed or pasted text; case and line breaks do not matter. Raises PierError."""
        compact = "".join(text.split()).lower()
        if compact.startswith("pierinvite"):
            raise PierError(
                "this is an invite of a coordinator, not the token of a run", "Use it with --coordinator HOST:PORT."
            )
        prefix, founder = (_PREFIX, 0) if compact.startswith(_PREFIX) else (_PREFIX_WITH_FOUNDER, _FOUNDER)
        body = read(prefix, _SECRET + _RUN + founder, text)
        return cls(body[:_SECRET], body[_SECRET : _SECRET + _RUN], body[_SECRET + _RUN :].hex())

    def __str__(self) -> str:
        prefix = _PREFIX_WITH_FOUNDER if self.founder else _PREFIX
        return spell(prefix, self.secret + self.run + bytes.fromhex(self.founder))

    def is_for(self, run_hash: bytes) -> bool:
        """Whether the token was made for the run whose configuration has this hash."""
        return run_hash[:_RUN] == self.run

    def require_run(self, run_hash: bytes) -> None:
        """Check that the token was made for a configuration. Raises PierError."""
        if not self.is_for(run_hash):
            raise PierError(
                f"the token is for run {self.run.hex()[:8]}, the configuration here is run {run_hash.hex()[:8]}",
                "Use the token of this run, or start without run.toml to get the configuration from --peers.",
            )

    def save(self, folder: Path) -> None:
        """Keep the token in a data directory, so that the same command restarts the site. Raises PierError."""
        try:
            write_private(self.path(folder), f"{self}\n".encode())
        except OSError as error:
            raise durable.unwritable(f"cannot write {self.path(folder)}", error) from error

    @staticmethod
    def path(folder: Path) -> Path:
        """The token file of a data directory."""
        return folder / _TOKEN_FILE

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The token kept in a data directory; None if there is none. Raises PierError."""
        path = cls.path(folder)
        try:
            return cls.parse(path.read_text(errors="replace"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise durable.forbidden(path, error) from error
        except PierError as error:
            raise PierError(f"{path}: {error.problem}", "Delete it and start with --token again.") from error


def node_id(key: ec.EllipticCurvePublicKey) -> str:
    """The first 16 hex digits of SHA-256 of a public key in DER."""
    return hashlib.sha256(public_der(key)).hexdigest()[:16]


def public_der(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in DER (SubjectPublicKeyInfo): 91 bytes."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM text (PKCS #8, not encrypted)."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    remedy = f"Restore it from a backup, or delete it: this site then joins under a new node id ({path})."
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise PierError(f"{path}: not a private key: {error}", remedy) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PierError(f"{path}: a private key of another kind than P-256", remedy)
    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, either whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        durable.put(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


KNOWN = 1 << 14
"""Number of valid signatures that are remembered, by hash: a leader shows the same ones to everyone."""

ALGORITHM = ec.ECDSA(hashes.SHA256())
"""Of every signature by a node's key."""
_known: set[bytes] = set()


@dataclass(frozen=True)
class Signer:
    """Signs in the name of one node, for one run."""

    identity: Identity
    run_hash: bytes

    @property
    def node(self) -> str:
        """The node whose signatures these are."""
        return self.identity.node

    @property
    def public(self) -> bytes:
        """The key that verifies the signatures, in DER."""
        return public_der(self.identity.key.public_key())

    def sign(self, purpose: str, statement: bytes) -> bytes:
        """The signature of a statement: ECDSA over P-256 and SHA-256, DER, at most 72 bytes."""
        return self.identity.key.sign(_signed(purpose, self.run_hash, statement), ALGORITHM)

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
        key.verify(signature, message, ALGORITHM)
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
