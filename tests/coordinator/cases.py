"""A run to test the coordinator with: its sites, its authority, an invite, and calls as sites make them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import Message

from pier_coordinator.identity.home import Authority
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.service.service import SERVICE, CoordinatorService, Limits
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.sites import InviteRow, Registration, enrol
from pier_coordinator.store.store import Store
from pier_node.config.run import RunConfig, RunSection
from pier_node.identity.certificates import Credentials, credentials
from pier_node.identity.node import Identity, Token, key_pem
from pier_node.identity.tls import channel
from pier_node.wire.carrier import PROTOCOL
from pier_proto.v1.coordinator_pb2 import (
    EnrolReply,
    EnrolRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Note,
    Order,
    Paths,
    Record,
    RegisterReply,
    RegisterRequest,
    ReportReply,
    ReportRequest,
    WatchRequest,
)
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

NOW = 1_800_000_000.0
CONFIG = RunConfig(run=RunSection(name="lark", sites=2))
TOKEN = Token(bytes(32), CONFIG.hash()[:16])
OWN, ALICE, BOB, CAROL = (Identity(ec.derive_private_key(number, ec.SECP256R1())) for number in (1, 2, 3, 4))
AUTHORITY = Authority(TOKEN, CONFIG.hash())
STREAM = b"stream"
PATIENCE = 60.0
"""Seconds in which whatever takes milliseconds happens on a busy machine."""

R = TypeVar("R", bound=Message)


class Clock:
    """Stands still until told otherwise."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def note(text: str, node: str = ALICE.node) -> Fact:
    return Fact(NOW, "note", node, {"level": 20, "text": text})


def registration(name: str = "", lease: bytes = b"lease") -> Registration:
    return Registration(name, "10.0.0.1:7700", "grpc", "0.1.0", 1, lease)


def open_store(folder: Path, told: Callable[[list[Fact]], None] = lambda _: None) -> Store:
    return Store(folder / "run.db", told)


@dataclass(frozen=True)
class Ticket:
    """An invite as its holder has it."""

    id: str
    key: ec.EllipticCurvePrivateKey
    pem: bytes

    @classmethod
    def make(cls, id: str = "first") -> Ticket:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Pier invite {id}")])
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key())
            .serial_number(1)
            .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
            .not_valid_after(datetime.now(UTC) + timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(id, key, certificate.public_bytes(serialization.Encoding.PEM))

    def row(self, name: str | None = None, hours: float = 24, uses: int = 1, now: float = NOW) -> InviteRow:
        return InviteRow(self.id, name, now + hours * 3600, uses, self.pem, now)

    @property
    def credentials(self) -> Credentials:
        return Credentials(credentials(OWN, TOKEN).ca_pem, self.pem, key_pem(self.key))

    def request(self, site: Identity, **fields: Any) -> EnrolRequest:
        der = x509.load_pem_x509_certificate(self.pem).public_bytes(serialization.Encoding.DER)
        key = site.key.public_key()
        spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        proof = site.key.sign(der, ec.ECDSA(hashes.SHA256()))
        given = {"protocol": PROTOCOL, "name": "lab-a", "public_key": spki, "proof": proof, "time": NOW}
        return EnrolRequest(**{**given, **fields})


def register_request(site: Identity, **fields: Any) -> RegisterRequest:
    about = Site(node=site.node, name=fields.pop("name", ""), address="10.0.0.1:7700")
    given = {"protocol": PROTOCOL, "run_hash": CONFIG.hash(), "site": about, "transport": "grpc", "time": NOW}
    return RegisterRequest(**{**given, "version": "0.1.0", **fields})


def pulse(site: Identity, phase: Phase.ValueType = Phase.PHASE_TRAINING, **fields: Any) -> Pulse:
    return Pulse(site=Site(node=site.node), phase=phase, **fields)


def report_request(lease: bytes, first: int, *texts: str) -> ReportRequest:
    records = [Record(time=NOW, note=Note(level=20, text=text)) for text in texts]
    return ReportRequest(lease=lease, stream=STREAM, first=first, records=records)


class Caller:
    """A connection to the coordinator."""

    def __init__(self, port: int, own: Credentials) -> None:
        self.channel = channel(f"127.0.0.1:{port}", OWN.node, own, [("grpc.use_local_subchannel_pool", 1)])

    async def raw(self, method: str, request: bytes) -> bytes:
        call = self.channel.unary_unary(f"/{SERVICE}/{method}", None, None)
        answer: bytes = await call(request, timeout=PATIENCE)
        return answer

    async def _ask(self, method: str, request: Message, kind: type[R]) -> R:
        return kind.FromString(await self.raw(method, request.SerializeToString()))

    async def enrol(self, request: EnrolRequest) -> EnrolReply:
        return await self._ask("Enrol", request, EnrolReply)

    async def register(self, site: Identity, **fields: Any) -> RegisterReply:
        return await self._ask("Register", register_request(site, **fields), RegisterReply)

    async def beat(
        self, site: Identity, lease: bytes, paths: Paths | None = None, knows: int = 0, **fields: Any
    ) -> HeartbeatReply:
        request = HeartbeatRequest(lease=lease, pulse=pulse(site, **fields), order=1, paths=paths, revocations=knows)
        while True:
            call = self.channel.stream_stream(f"/{SERVICE}/Heartbeat", None, None)(None, timeout=PATIENCE)
            try:
                await call.write(request.SerializeToString())
                answer = await call.read()
                assert isinstance(answer, bytes)
                return HeartbeatReply.FromString(answer)
            except grpc.aio.AioRpcError as error:
                if error.details() != "Internal error from Core":  # the call ended during the write: its reason is lost
                    raise
            finally:
                call.cancel()

    async def report(self, request: ReportRequest) -> ReportReply:
        return await self._ask("Report", request, ReportReply)

    async def watch(self, lease: bytes) -> AsyncGenerator[Order]:
        call = self.channel.unary_stream(f"/{SERVICE}/Watch", None, None)
        async for raw in call(WatchRequest(lease=lease).SerializeToString(), timeout=PATIENCE):
            yield Order.FromString(raw)


@dataclass
class Running:
    """A coordinator that listens."""

    coordinator: Coordinator
    port: int
    wall: Clock
    clock: Clock
    told: list[Fact]

    @asynccontextmanager
    async def caller(self, own: Credentials) -> AsyncGenerator[Caller]:
        caller = Caller(self.port, own)
        try:
            yield caller
        finally:
            await caller.channel.close(None)

    @asynccontextmanager
    async def site(self, site: Identity) -> AsyncGenerator[Caller]:
        async with self.caller(credentials(site, TOKEN)) as caller:
            yield caller

    async def let_in(self, *sites: Identity, first: int = 0) -> None:
        for number, site in enumerate(sites, first):
            ticket = Ticket.make(f"for-{site.node}")
            await self.coordinator.invite(ticket.row())
            self.coordinator.stands(
                await self.coordinator.store.do(enrol, site.node, f"lab-{number}", ticket.id, self.wall())
            )


@asynccontextmanager
async def running(folder: Path, limits: Limits | None = None, port: int = 0) -> AsyncGenerator[Running]:
    told: list[Fact] = []
    store = open_store(folder, told.extend)
    wall, clock = Clock(), Clock(0.0)
    coordinator = Coordinator(store, CONFIG, wall, clock)
    await coordinator.begin()
    service = CoordinatorService(coordinator, credentials(OWN, TOKEN), AUTHORITY, limits)
    try:
        yield Running(coordinator, await service.start("127.0.0.1", port), wall, clock, told)
    finally:
        await service.stop()
        await store.close()
