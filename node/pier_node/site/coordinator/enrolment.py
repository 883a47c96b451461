"""Enrolment: exchanges an invite for this node's own certificate, and stores where the coordinator is.

The site does not know the run's authority yet. It therefore looks at the key of the server that answers and compares it
with the pin in the invite. Only if they match does it talk to the server, and it trusts only that one certificate
(docs/multi-site.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, from_canonical
from pier_node.identity.certificates import Credentials, check_issued
from pier_node.identity.invite import Invite, pin
from pier_node.identity.node import Identity, key_pem, node_id
from pier_node.identity.tls import certificate_at
from pier_node.outer.deadline import Attempts
from pier_node.site.coordinator.link import Link, Refused, Unreachable
from pier_node.wire.carrier import PROTOCOL
from pier_proto.v1.coordinator_pb2 import EnrolReply, EnrolRequest

FILE = "coordinator.json"
LOOK = 10.0
"""Seconds to connect and read the server's key."""
ANSWER = 20.0
PATIENCE = 300.0
"""Seconds to keep trying a coordinator that does not answer."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Enrolment:
    """The place in the run that the coordinator assigned.

    Attributes:
        address: HOST:PORT of the coordinator.
        node: node id of the coordinator.
        authority: certificate of the run's authority, PEM.
        certificate: this node's certificate, PEM.
    """

    address: str
    node: str
    authority: str
    certificate: str

    def credentials(self, identity: Identity) -> Credentials:
        """The credentials that prove to others that this node belongs to the run."""
        return Credentials(self.authority.encode(), self.certificate.encode(), key_pem(identity.key))

    def save(self, folder: Path) -> None:
        """Store the enrolment in a data directory, so that no further invite is needed."""
        durable.replace(folder / FILE, durable.seal(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The enrolment stored in a data directory; None if there is none. Raises PierError."""
        if not (folder / FILE).exists():
            return None
        try:
            return cls(**durable.read_sealed(folder / FILE))
        except (durable.Torn, TypeError) as torn:
            problem = f"{folder / FILE}: {torn}"
            raise PierError(problem, "Delete it, and start with --coordinator and a new invite.") from torn


async def enrol_patiently(address: str, invite: Invite, identity: Identity, name: str) -> tuple[Enrolment, RunConfig]:
    """Call `enrol` until the coordinator answers or PATIENCE seconds have passed. Raises PierError."""
    attempts = Attempts("the coordinator does not answer yet", PATIENCE)
    while True:
        try:
            return await enrol(address, invite, identity, name)
        except Unreachable as problem:
            if not await attempts.failed(str(problem)):
                raise PierError(
                    f"the coordinator does not answer: {problem}",
                    "Does it run, is its port open to this machine, and is the address right?",
                ) from problem


async def enrol(address: str, invite: Invite, identity: Identity, name: str) -> tuple[Enrolment, RunConfig]:
    """Have the coordinator admit this node to the run. Raises PierError when it refuses, Unreachable."""
    try:
        leaf = await asyncio.to_thread(certificate_at, address, LOOK)
    except (OSError, ValueError) as error:
        raise Unreachable(f"{address}: {getattr(error, 'strerror', None) or error}") from error
    coordinator = _pinned(leaf, address, invite)
    own = Credentials(_pem(leaf), invite.certificate, key_pem(invite.key))
    link = Link(address, coordinator, own)
    try:
        reply = await link.enrol(_request(identity, invite, name), ANSWER)
    except Refused as refused:
        problem = f"the coordinator at {address} does not let this site in: {refused}"
        raise PierError(
            problem, "Ask its operator for a new invite: `pier-coordinator invite` prints one."
        ) from refused
    finally:
        await link.close()
    return _checked(reply, identity, address, coordinator)


def _pinned(leaf: x509.Certificate, address: str, invite: Invite) -> str:
    """Check the certificate against the invite's pin and return the coordinator's node id. Raises PierError."""
    key = leaf.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or pin(key) != invite.pin:
        raise PierError(
            f"{address}: whoever answers there is not the coordinator that this invite is from",
            "Check the address: the command that `pier-coordinator invite` prints has both.",
        )
    return node_id(key)


def _request(identity: Identity, invite: Invite, name: str) -> EnrolRequest:
    public = identity.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    shown = x509.load_pem_x509_certificate(invite.certificate).public_bytes(serialization.Encoding.DER)
    proof = identity.key.sign(shown, ec.ECDSA(hashes.SHA256()))
    return EnrolRequest(protocol=PROTOCOL, name=name, public_key=public, proof=proof, time=time.time())


def _checked(reply: EnrolReply, identity: Identity, address: str, node: str) -> tuple[Enrolment, RunConfig]:
    try:
        check_issued(reply.certificate, reply.authority, identity)
    except ValueError as error:
        raise PierError(f"{address}: the coordinator's answer is not valid: {error}", "Tell its operator.") from error
    enrolment = Enrolment(address, node, reply.authority.decode(), reply.certificate.decode())
    return enrolment, from_canonical(reply.run_config)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
