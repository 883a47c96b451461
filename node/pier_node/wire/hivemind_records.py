"""Who may take part in the run's DHT, and what it keeps. What hivemind's DHT unpacks is MessagePack, never a pickle."""

from __future__ import annotations

import secrets
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils.auth import AuthorizerBase

from pier_node.certificates import Credentials
from pier_node.wire.passport import certified

RECORD_BYTES = 2048
_NODE_BYTES = 16
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Holders(AuthorizerBase):  # type: ignore[misc]
    """Lets only holders of the run's token ask and answer: each message carries a certificate and is signed.

    An answer names its question. A question may be asked again by whoever heard it, and does no harm then: what it
    stores is what its author said.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials, self._key = credentials, credentials.key

    async def sign_request(self, request: Any, _service_public_key: Any) -> None:
        """Called by hivemind before it asks."""
        request.auth.client_access_token.public_key = self._credentials.cert_pem
        request.auth.nonce = secrets.token_bytes(16)
        request.auth.signature = self._key.sign(request.SerializeToString(deterministic=True), _ALGORITHM)

    async def validate_request(self, request: Any) -> bool:
        """Called by hivemind before it answers."""
        return self._signed(request, request.auth.client_access_token.public_key)

    async def sign_response(self, response: Any, request: Any) -> None:
        """Called by hivemind after it answered."""
        response.auth.service_access_token.public_key = self._credentials.cert_pem
        response.auth.nonce = request.auth.nonce
        response.auth.signature = self._key.sign(response.SerializeToString(deterministic=True), _ALGORITHM)

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Called by hivemind before it believes an answer."""
        same = response.auth.nonce == request.auth.nonce
        return same and self._signed(response, response.auth.service_access_token.public_key)

    def _signed(self, message: Any, certificate: bytes) -> bool:
        signature = message.auth.signature
        message.auth.signature = b""
        try:
            key = certified(self._credentials.ca_pem, certificate)
            key.verify(signature, message.SerializeToString(deterministic=True), _ALGORITHM)
        except (ValueError, InvalidSignature):
            return False
        return True


class Records(RecordValidatorBase):  # type: ignore[misc]
    """Keeps nothing but short records of where the sites of a run are."""

    def __init__(self, run_hash: bytes) -> None:
        self._run = run_hash

    def validate(self, record: DHTRecord) -> bool:
        """Called by hivemind before it keeps or believes a record."""
        node = record.value[:_NODE_BYTES].decode(errors="replace")
        return len(record.value) <= RECORD_BYTES and record.key == key_of(self._run, node).to_bytes()


def key_of(run_hash: bytes, node: str) -> DHTID:
    """Under which key the record of a node is kept."""
    return DHTID.generate(source=run_hash + node.encode())


def record(node: str, address: str) -> bytes:
    """What a node says of itself."""
    return f"{node} {address}".encode()


def said_by(node: str, value: bytes) -> str:
    """The address in a record; "": it is of another node."""
    who, _, address = value.decode(errors="replace").partition(" ")
    return address if who == node else ""
