"""What the coordinator answers to sites. Who they are is known by then, and what they sent is within bounds."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key
from google.protobuf.json_format import ParseDict
from pydantic import ValidationError

from pier.v1.coordinator_pb2 import (
    Assignment,
    CheckpointPart,
    DeliverReply,
    DeliverRequest,
    EnrolReply,
    EnrolRequest,
    FetchCheckpointRequest,
    GiveCheckpointReply,
    HeartbeatReply,
    HeartbeatRequest,
    Order,
    RegisterReply,
    RegisterRequest,
    ReportReply,
    ReportRequest,
    WatchRequest,
)
from pier.v1.peer_pb2 import Revocations, Site
from pier_coordinator import admission, records
from pier_coordinator.authority import Authority
from pier_coordinator.coordinator import Coordinator
from pier_coordinator.refusals import Refused
from pier_coordinator.registry import HEARTBEAT_SECONDS, LEASE_SECONDS
from pier_coordinator.store.rows import OrderRow, Registration, SiteRow
from pier_coordinator.tls import der
from pier_node.certificates import Credentials
from pier_node.config_errors import first_problem
from pier_node.coordination.expert_messages import kept
from pier_node.identity import node_id
from pier_node.wire.carrier import BadMessage
from pier_node.wire.values import REVOKED

DELIVERY = 300.0
"""Seconds that a delivery may take."""
FIRST = 60.0
"""Seconds until the first part of a checkpoint."""

_ACTIVITIES = {
    "train": Order.ACTIVITY_TRAIN,
    "pause": Order.ACTIVITY_PAUSE,
    "stop": Order.ACTIVITY_STOP,
}


class Reception:
    """Answers for a coordinator.

    Args:
        node: the coordinator's node id.
    """

    def __init__(self, coordinator: Coordinator, own: Credentials, node: str, authority: Authority) -> None:
        self._of = coordinator
        self._certificate = own.ca_pem
        self._node = node
        self._authority = authority
        self._revocations = Revocations()
        self._delivering: set[str] = set()

    async def enrol(self, certificate: bytes, request: EnrolRequest) -> EnrolReply:
        """Let a site in that came with an invite's certificate (PEM). Raises Refused, BadMessage."""
        invite = self._of.invites.get(der(certificate))
        if invite is None:
            raise Refused("the coordinator does not know this invite: ask the run's operator for a new one")
        key = public_key(request.public_key)
        prove(key, request.proof, der(certificate))
        now = self._of.wall()
        if problem := admission.enrolment(request, now):
            raise Refused(problem)
        node = node_id(key)
        self._of.stands(await self._of.store.enrol(node, request.name, invite.id, now))
        self._of.look_at_invites()
        return EnrolReply(
            certificate=self._authority.certify(key),
            authority=self._certificate,
            run_config=self._of.config.canonical(),
            node=self._node,
        )

    async def register(self, node: str, request: RegisterRequest) -> RegisterReply:
        """Begin a lease. Raises Refused, Stranger."""
        now = self._of.wall()
        if request.site.node != node:
            raise BadMessage(f"RegisterRequest.site.node = {request.site.node}: the caller is {node}")
        if problem := admission.registration(request, self._of.run_hash, now):
            raise Refused(problem)
        if request.starting and self._of.orders[node].activity == "stop":
            await self._of.started_again(node)
        await self._of.experts.welcome(node)
        registered = await self._of.store.register(node, _registration(request), now)
        site = self._of.stands(registered)
        self._of.registry.admit(site)
        return RegisterReply(
            lease=site.lease,
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            founder=registered.founder,
            slot=self._slot(site),
            roster=[self._site(other) for other in self._of.sites.values() if _reachable(other) and other is not site],
            order=order(registered.order),
            revocations=self._news(0),
        )

    async def heartbeat(self, node: str, request: HeartbeatRequest) -> HeartbeatReply:
        """A site is here. Raises Unregistered, Superseded."""
        presence = self._of.registry.holder(node, request.lease)
        if back := self._of.registry.beat(presence, request.pulse, request.order):
            await self._of.store.note_presence(False, [back])
        if request.HasField("paths"):
            presence.paths = request.paths
        return HeartbeatReply(order=self._of.orders[node].epoch, revocations=self._news(request.revocations))

    async def watch(self, node: str, request: WatchRequest) -> AsyncIterator[Order]:
        """What a site shall do, now and whenever that changes. Ends with Stranger, Unregistered, Superseded."""
        told = 0
        mine = self._of.registry.holder(node, request.lease).watch()
        while True:
            self._of.member(node)
            changed = self._of.registry.watched(node, request.lease, mine)
            newest = self._of.orders[node]
            if newest.epoch > told:
                told = newest.epoch
                yield order(newest)
            await changed.wait()

    async def report(self, node: str, request: ReportRequest) -> ReportReply:
        """Take records. Raises Unregistered, Superseded."""
        self._of.registry.holder(node, request.lease)
        now = self._of.wall()
        report = records.report(node, request, now)
        stored = await self._of.store.take_report(report, now)
        await self._of.experts.take(node, report.facts)
        return ReportReply(stored=stored)

    async def deliver(self, node: str, pieces: AsyncIterator[DeliverRequest]) -> DeliverReply:
        """Take a score sheet. Raises Unregistered, Superseded, Refused, BadMessage."""
        if node in self._delivering:
            raise Refused("another delivery of this site is under way")
        self._delivering.add(node)
        try:
            async with asyncio.timeout(DELIVERY):
                first, content = await whole(pieces)
        except TimeoutError as error:
            raise Refused(f"the delivery has taken longer than {DELIVERY:.0f} s") from error
        finally:
            self._delivering.discard(node)
        self._of.registry.holder(node, first.lease)
        await self._of.experts.delivered(node, first.sheet, content)
        return DeliverReply()

    async def give_checkpoint(self, node: str, parts: AsyncIterator[CheckpointPart]) -> GiveCheckpointReply:
        """Take the checkpoint of an expert. Raises Unregistered, Superseded, Refused, BadMessage."""
        try:
            async with asyncio.timeout(FIRST):
                first = await anext(parts, None)
            if first is None or not first.HasField("checkpoint"):
                raise BadMessage("a checkpoint that does not say which it is")
            about = kept(first.checkpoint)
        except TimeoutError as error:
            raise Refused(f"nothing has come for {FIRST:.0f} s") from error
        except ValidationError as error:
            raise BadMessage(f"CheckpointPart.checkpoint: {first_problem(error)}") from error
        self._of.registry.holder(node, first.lease)
        await self._of.experts.give_checkpoint(node, first.plan, about, parts)
        return GiveCheckpointReply()

    async def fetch_checkpoint(self, node: str, request: FetchCheckpointRequest) -> AsyncIterator[CheckpointPart]:
        """The parts of the one that is kept of a site's job. Raises Unregistered, Superseded, Refused."""
        self._of.registry.holder(node, request.lease)
        async for part in self._of.experts.fetch_checkpoint(node, request.plan, request.job):
            yield part

    def _news(self, known: int) -> Revocations | None:
        """The list of revoked sites, for a site that knows it in that version."""
        version = self._of.revocations
        if known >= version:
            return None
        if self._revocations.version != version:
            self._revocations = self._authority.revocations(version, self._of.revoked[-REVOKED:])
        return self._revocations

    def _slot(self, site: SiteRow) -> int:
        return (site.slot or 0) % self._of.config.run.sites

    def _site(self, site: SiteRow) -> Site:
        return Site(node=site.node, name=site.name, address=site.address, slot=self._slot(site))


async def whole(pieces: AsyncIterator[DeliverRequest]) -> tuple[DeliverRequest, bytes]:
    """The first message of a delivery, and what all its pieces are together. Raises BadMessage."""
    first: DeliverRequest | None = None
    content = bytearray()
    async for message in pieces:
        first = first or message
        content += message.piece
        if len(content) > first.size:
            raise BadMessage(f"a delivery of more than the {first.size} bytes that it was to have")
    if first is None or not first.HasField("sheet"):
        raise BadMessage("a delivery that does not say what it is")
    if len(content) != first.size or hashlib.sha256(content).digest() != first.digest:
        raise BadMessage(f"DeliverRequest.digest is not that of the {len(content)} bytes that came")
    return first, bytes(content)


def order(row: OrderRow) -> Order:
    """An order as a message."""
    assignment = ParseDict(row.assignment, Assignment())
    return Order(epoch=row.epoch, activity=_ACTIVITIES[row.activity], assignment=assignment)


def public_key(raw: bytes) -> ec.EllipticCurvePublicKey:
    """A node's public key (DER, SubjectPublicKeyInfo). Raises BadMessage."""
    try:
        key = load_der_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadMessage("EnrolRequest.public_key is no public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadMessage("EnrolRequest.public_key is not of the kind P-256")
    return key


def prove(key: ec.EllipticCurvePublicKey, proof: bytes, invite: bytes) -> None:
    """Make sure that the holder of a key signed an invite's certificate (DER) with it. Raises BadMessage."""
    try:
        key.verify(proof, invite, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise BadMessage("EnrolRequest.proof is not this invite, signed by that key") from error


def _registration(request: RegisterRequest) -> Registration:
    site = request.site
    lease = secrets.token_bytes(16)
    return Registration(site.name, site.address, request.transport, request.version, request.workers, lease)


def _reachable(site: SiteRow) -> bool:
    return site.revoked_at is None and bool(site.lease)
