"""Answers the calls of sites. The caller is identified by then, and its request is within bounds.

The functions that check an enrolment or a registration are pure: they return what is wrong and what to do about it, or
"" if nothing is wrong. Other functions turn the records of a report into facts: a number that is not known is NaN in a
message and None in a fact.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from pydantic import ValidationError

from pier_coordinator.identity.home import Authority
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.runs.sites import HEARTBEAT_SECONDS, LEASE_SECONDS
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.inbox import Inbox
from pier_coordinator.store.sites import (
    OrderRow,
    Refused,
    Registration,
    Report,
    SiteRow,
    WrongClock,
    enrol,
    register,
    take_report,
)
from pier_node.base.toml import first_problem
from pier_node.identity.certificates import Credentials
from pier_node.identity.node import ALGORITHM, node_id
from pier_node.identity.tls import der
from pier_node.site.coordinator.expert_messages import kept
from pier_node.site.coordinator.link import DELIVERY
from pier_node.wire import tokenizer
from pier_node.wire.carrier import PROTOCOL, BadMessage
from pier_node.wire.rules import REVOKED
from pier_proto.v1 import coordinator_pb2 as pb
from pier_proto.v1.peer_pb2 import Revocations, Site, TokenizerPart, TokenizerRequest

CLOCK = 3600.0
"""Seconds by which a site's clock may differ: beyond that, its reports would be misplaced in every chart."""


def registration(request: pb.RegisterRequest, run_hash: bytes) -> str:
    """What is wrong with a registration until its site is started anew, or for ever.

    Names are not checked here but where they are assigned (store/sites.py).
    """
    return protocol(request.protocol) or configuration(request.run_hash, run_hash)


def enrolment(request: pb.EnrolRequest, now: float) -> str:
    """What is wrong with an enrolment, apart from its invite."""
    return protocol(request.protocol) or clock(request.time, now)


def protocol(theirs: int) -> str:
    """What is wrong with a site's protocol version."""
    if theirs == PROTOCOL:
        return ""
    older, where = ("older", "your site") if theirs < PROTOCOL else ("newer", "the coordinator's machine")
    return (
        f"your Pier is {older}: it speaks protocol {theirs}, the coordinator speaks {PROTOCOL}; "
        f"upgrade Pier on {where} and start again"
    )


def configuration(theirs: bytes, ours: bytes) -> str:
    """What is wrong with a site's configuration hash."""
    if theirs == ours:
        return ""
    return (
        f"your configuration is of run {theirs.hex()[:8]}, this coordinator's run is {ours.hex()[:8]}; "
        "start without --run, and the site takes the coordinator's"
    )


def clock(theirs: float, ours: float) -> str:
    """What is wrong with a site's clock (seconds since the epoch)."""
    late = ours - theirs
    if abs(late) <= CLOCK:
        return ""
    side = "behind" if late > 0 else "ahead of"
    return f"your clock is {_amount(abs(late))} {side} the coordinator's: set it (timedatectl set-ntp true)"


def _amount(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} minutes"
    return f"{round(minutes / 60)} hours" if minutes < 2880 else f"{round(minutes / 1440)} days"


def facts_of_report(node: str, request: pb.ReportRequest, enrolled_at: float, now: float) -> Report:
    """Convert a report into the form that is stored."""
    facts = [fact(node, record, enrolled_at - CLOCK, now) for record in request.records]
    return Report(node, request.stream, request.first, facts, request.dropped)


def fact(node: str, record: pb.Record, since: float, now: float) -> Fact:
    """Convert a record into a fact. A time before `since` or after `now`, by a wrong clock of the site, becomes that:
    a single point far away would flatten every chart."""
    kind = record.WhichOneof("body")
    assert kind is not None
    return Fact(min(max(record.time, since), now), kind, node, _fields(getattr(record, kind)))


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, int | str) else list(value)


FIRST = 60.0
"""Maximum wait for the first message about a file, in seconds."""
SHEETS = "deliveries"
"""Folder of the score sheets that have arrived in part, in the run's folder."""

M = TypeVar("M", bound=Message)


class Reception:
    """Answers the calls of sites for a coordinator, with its credentials and its node id."""

    def __init__(self, coordinator: Coordinator, own: Credentials, node: str, authority: Authority) -> None:
        self._of = coordinator
        self._certificate = own.ca_pem
        self._node = node
        self._authority = authority
        self._revocations = Revocations()
        self._sheets = Inbox(coordinator.store.folder / SHEETS, "delivery")

    async def enrol(self, certificate: bytes, request: pb.EnrolRequest) -> pb.EnrolReply:
        """Enrol a site that calls with an invite's certificate (PEM). Raises Refused, BadMessage."""
        invite = self._of.invites.get(der(certificate))
        if invite is None:
            raise Refused("the coordinator does not know this invite")
        key = public_key(request.public_key)
        prove(key, request.proof, der(certificate))
        now = self._of.wall()
        if problem := enrolment(request, now):
            raise Refused(problem)
        node = node_id(key)
        self._of.stands(await self._of.store.do(enrol, node, request.name, invite.id, now))
        self._of.look_at_invites()
        return pb.EnrolReply(
            certificate=self._authority.certify(key),
            authority=self._certificate,
            run_config=self._of.config.canonical(),
            node=self._node,
        )

    async def register(self, node: str, request: pb.RegisterRequest) -> pb.RegisterReply:
        """Register a site that starts, and begin its lease. Raises Refused, Stranger, BadMessage."""
        now = self._of.wall()
        if request.site.node != node:
            raise BadMessage(f"RegisterRequest.site.node = {request.site.node}: the caller is {node}")
        if problem := registration(request, self._of.run_hash):
            raise Refused(problem)
        if problem := clock(request.time, now):
            raise WrongClock(problem)
        if request.starting and self._of.orders[node].activity == "stop":
            await self._of.order("train", [node], by="being started again")
        await self._of.experts.welcome(node)
        registered = await self._of.store.do(register, node, _registration(request), now)
        site = self._of.stands(registered)
        self._of.registry.admit(site)
        return pb.RegisterReply(
            lease=site.lease,
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            founder=registered.founder,
            slot=self._slot(site),
            roster=[self._site(other) for other in self._of.sites.values() if _reachable(other) and other is not site],
            order=order(registered.order),
            revocations=self._news(0),
        )

    async def tokenizer(self, _node: str, request: TokenizerRequest) -> TokenizerPart:
        """A part of the run's tokenizer.json. Raises BadMessage."""
        return await asyncio.to_thread(tokenizer.part, self._of.config, request)

    async def heartbeat(self, node: str, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        """Take the heartbeat of a site. Raises Unregistered, Superseded."""
        presence = self._of.registry.holder(node, request.lease)
        if back := self._of.registry.beat(presence, request.pulse, request.order):
            await self._of.note_presence(False, [back])
        if request.HasField("paths"):
            presence.paths = request.paths
        return pb.HeartbeatReply(order=self._of.orders[node].epoch, revocations=self._news(request.revocations))

    async def watch(self, node: str, request: pb.WatchRequest) -> AsyncIterator[pb.Order]:
        """Yield a site's order, now and whenever it changes. Ends with Stranger, Unregistered, Superseded."""
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

    async def report(self, node: str, request: pb.ReportRequest) -> pb.ReportReply:
        """Store the records of a report. Raises Unregistered, Superseded."""
        self._of.registry.holder(node, request.lease)
        now = self._of.wall()
        report = facts_of_report(node, request, self._of.member(node).enrolled_at, now)
        stored = await self._of.store.do(take_report, report, now)
        await self._of.experts.take(node, report.facts)
        return pb.ReportReply(stored=stored)

    async def arrived(self, node: str, request: pb.ArrivedRequest) -> pb.ArrivedReply:
        """Say how much is here of a file whose transfer was interrupted. Raises Unregistered, Superseded."""
        self._of.registry.holder(node, request.lease)
        digest = request.digest.hex()
        return pb.ArrivedReply(offset=self._sheets.arrived(node, digest) or self._of.experts.arrived(node, digest))

    async def deliver(self, node: str, pieces: AsyncIterator[pb.DeliverRequest]) -> pb.DeliverReply:
        """Take a score sheet. Raises Unregistered, Superseded, Refused, BadMessage."""
        first = await _first_of(pieces)
        if first is None or not first.HasField("sheet"):
            raise BadMessage("a delivery that does not say what it is")
        self._of.registry.holder(node, first.lease)

        async def content() -> AsyncIterator[bytes]:
            yield first.piece
            async for message in pieces:
                yield message.piece

        whole = first.size, first.digest.hex()
        try:
            async with self._sheets.receive(node, *whole, content(), first.offset, DELIVERY) as path:
                sheet = await asyncio.to_thread(path.read_bytes)
        except ValueError as error:
            raise BadMessage(f"a delivery: {error}") from error
        await self._of.experts.current().delivered(node, first.sheet, sheet)
        return pb.DeliverReply()

    async def give_checkpoint(self, node: str, parts: AsyncIterator[pb.CheckpointPart]) -> pb.GiveCheckpointReply:
        """Take the checkpoint of an expert. Raises Unregistered, Superseded, Refused, BadMessage."""
        first = await _first_of(parts)
        if first is None or not first.HasField("checkpoint"):
            raise BadMessage("a checkpoint that does not say which it is")
        try:
            about = kept(first.checkpoint)
        except ValidationError as error:
            raise BadMessage(f"CheckpointPart.checkpoint: {first_problem(error)}") from error
        self._of.registry.holder(node, first.lease)
        await self._of.experts.give_checkpoint(node, first.plan, about, parts, first.offset)
        return pb.GiveCheckpointReply()

    async def fetch_checkpoint(self, node: str, request: pb.FetchCheckpointRequest) -> AsyncIterator[pb.CheckpointPart]:
        """Yield the parts of the checkpoint kept for a site's job. Raises Unregistered, Superseded, Refused."""
        self._of.registry.holder(node, request.lease)
        async for part in self._of.experts.fetch_checkpoint(node, request):
            yield part

    def _news(self, known: int) -> Revocations | None:
        """The signed list of revoked sites, unless the site has the newest version; `known` is the one it has."""
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


async def _first_of(messages: AsyncIterator[M]) -> M | None:
    """The first message of a stream; None: there is none. Raises Refused."""
    try:
        async with asyncio.timeout(FIRST):
            return await anext(messages, None)
    except TimeoutError as error:
        raise Refused(f"nothing has come for {FIRST:.0f} s") from error


def order(row: OrderRow) -> pb.Order:
    """Convert an order into a message."""
    activity = pb.Order.Activity.Value(f"ACTIVITY_{row.activity.upper()}")
    return pb.Order(epoch=row.epoch, activity=activity, assignment=ParseDict(row.assignment, pb.Assignment()))


def public_key(raw: bytes) -> ec.EllipticCurvePublicKey:
    """Load a node's public key (DER, SubjectPublicKeyInfo). Raises BadMessage."""
    try:
        key = load_der_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadMessage("EnrolRequest.public_key is no public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadMessage("EnrolRequest.public_key is not of the kind P-256")
    return key


def prove(key: ec.EllipticCurvePublicKey, proof: bytes, invite: bytes) -> None:
    """Check that an invite's certificate (DER) was signed with this key. Raises BadMessage."""
    try:
        key.verify(proof, invite, ALGORITHM)
    except InvalidSignature as error:
        raise BadMessage("EnrolRequest.proof is not this invite, signed by that key") from error


def _registration(request: pb.RegisterRequest) -> Registration:
    site = request.site
    lease = secrets.token_bytes(16)
    return Registration(site.name, site.address, request.transport, request.version, request.workers, lease)


def _reachable(site: SiteRow) -> bool:
    return site.revoked_at is None and bool(site.lease)
