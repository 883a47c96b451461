"""The connection from a site to its coordinator, over gRPC with mutual TLS, and the enrolment that makes it possible.

Enrolment exchanges an invite for this node's own certificate, and stores where the coordinator is. The site does not
know the run's authority yet. It therefore looks at the key of the server that answers and compares it with the pin in
the invite. Only if they match does it talk to the server, and it trusts only that one certificate (docs/multi-site.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.patience import Attempts
from pier_node.config.run import RunConfig, from_canonical
from pier_node.identity import tls
from pier_node.identity.certificates import Credentials, check_issued, pem
from pier_node.identity.invite import Invite, pin
from pier_node.identity.node import ALGORITHM, Identity, key_pem, node_id, public_der
from pier_node.identity.tls import certificate_at
from pier_node.wire import tokenizer
from pier_node.wire.carrier import PROTOCOL
from pier_node.wire.grpc.carrier import CHANNEL_OPTIONS, NO_PROBES
from pier_node.wire.grpc.reasons import lost
from pier_proto.v1 import coordinator_pb2 as pb
from pier_proto.v1.coordinator_pb2 import EnrolReply, EnrolRequest
from pier_proto.v1.peer_pb2 import TokenizerPart, TokenizerRequest, WitnessReply, WitnessRequest

log = logging.getLogger(__name__)

SERVICE = "pier.v1.Coordinator"
DELIVERY = 300.0
"""Longest duration of delivering a score sheet, in seconds."""
_NO = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

R = TypeVar("R", bound=Message)
T = TypeVar("T")


class Unreachable(Exception):
    """No answer for now; try again later. The text says why."""


class Refused(Exception):
    """The coordinator refused. The text says why and what to do."""


class NoLease(Exception):
    """The coordinator does not know this start of the site; the site must register again."""


class Link:
    """One connection to the coordinator.

    Args:
        node: the coordinator's node id, which its certificate must contain.
        own: the credentials that this end presents and the authority that it trusts.
    """

    def __init__(self, address: str, node: str, own: Credentials) -> None:
        self.address = address
        self._channel = tls.channel(address, node, own, [*CHANNEL_OPTIONS, NO_PROBES])
        self._beats: grpc.aio.StreamStreamCall[bytes, bytes] | None = None

    async def enrol(self, request: pb.EnrolRequest, timeout: float) -> pb.EnrolReply:
        """Call Enrol. Raises Refused, Unreachable."""
        return await self._ask("Enrol", request, pb.EnrolReply, timeout)

    async def tokenizer(self, request: TokenizerRequest) -> TokenizerPart:
        """Call Tokenizer. Raises Refused, Unreachable."""
        return await self._ask("Tokenizer", request, TokenizerPart, tokenizer.PATIENCE)

    async def register(self, request: pb.RegisterRequest, timeout: float) -> pb.RegisterReply:
        """Call Register. Raises Refused, Unreachable."""
        return await self._ask("Register", request, pb.RegisterReply, timeout)

    async def heartbeat(self, request: pb.HeartbeatRequest, timeout: float) -> pb.HeartbeatReply:
        """Send one heartbeat and return the reply; not reentrant. Raises NoLease, Refused, Unreachable."""
        beats = self._beats = self._beats or self._channel.stream_stream(f"/{SERVICE}/Heartbeat", None, None)(None)
        try:
            async with asyncio.timeout(timeout):
                await beats.write(request.SerializeToString())
                raw = await beats.read()
            if isinstance(raw, bytes):
                return _parsed(pb.HeartbeatReply, raw)
            problem: Exception = Unreachable("it ended the stream of heartbeats")
        except grpc.aio.AioRpcError as error:
            problem = self._problem(error, timeout)
        except asyncio.InvalidStateError:  # the stream had ended before this write: reading gives the reason
            problem = await self._end_of(beats, timeout)
        except TimeoutError:
            problem = Unreachable(f"{self.address}: no answer within {timeout:.3g} s")
        self._beats = None
        beats.cancel()
        raise problem

    async def report(self, request: pb.ReportRequest, timeout: float) -> pb.ReportReply:
        """Call Report. Raises NoLease, Refused, Unreachable."""
        return await self._ask("Report", request, pb.ReportReply, timeout)

    async def witness(self, request: WitnessRequest, timeout: float) -> WitnessReply:
        """Call Witness. Raises Refused, Unreachable."""
        return await self._ask("Witness", request, WitnessReply, timeout)

    async def deliver(self, pieces: AsyncIterator[pb.DeliverRequest], timeout: float) -> pb.DeliverReply:
        """Call Deliver. Raises NoLease, Refused, Unreachable."""
        raw = (piece.SerializeToString() async for piece in pieces)
        try:
            call = self._channel.stream_unary(f"/{SERVICE}/Deliver", None, None)
            return _parsed(pb.DeliverReply, await call(raw, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise self._problem(error, timeout) from error

    async def arrived(self, request: pb.ArrivedRequest, timeout: float) -> pb.ArrivedReply:
        """Call Arrived. Raises NoLease, Refused, Unreachable."""
        return await self._ask("Arrived", request, pb.ArrivedReply, timeout)

    async def give_checkpoint(self, parts: AsyncIterator[pb.CheckpointPart], timeout: float) -> pb.GiveCheckpointReply:
        """Send a checkpoint.

        The first part describes it. The other parts are sent only if the coordinator wants it. Raises NoLease, Refused,
        Unreachable.
        """
        call = self._channel.stream_stream(f"/{SERVICE}/GiveCheckpoint", None, None)(None, timeout=timeout)
        wanted = False
        try:
            async for part in parts:
                await call.write(part.SerializeToString())
                wanted = wanted or isinstance(await call.read(), bytes)
            await call.done_writing()
            answer = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._problem(error, timeout) from error
        except asyncio.InvalidStateError as error:  # the stream had ended before this write: reading gives the reason
            raise await self._end_of(call, timeout) from error
        finally:
            call.cancel()
        if isinstance(answer, bytes):
            return _parsed(pb.GiveCheckpointReply, answer)
        raise Unreachable("it ended the stream")

    def fetch_checkpoint(self, request: pb.FetchCheckpointRequest, timeout: float) -> AsyncGenerator[pb.CheckpointPart]:
        """Yield the parts of a checkpoint as they arrive. Raises NoLease, Refused, Unreachable."""
        return self._stream("FetchCheckpoint", request, pb.CheckpointPart, timeout)

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.Order]:
        """Yield orders as they arrive, the current one first. Raises NoLease, Refused, Unreachable."""
        return self._stream("Watch", request, pb.Order, None)

    async def close(self) -> None:
        """Close the connection. Calls in progress fail."""
        await self._channel.close(None)

    async def _ask(self, method: str, request: Message, reply: type[R], timeout: float) -> R:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", None, None)
        try:
            return _parsed(reply, await call(request.SerializeToString(), timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise self._problem(error, timeout) from error

    async def _stream(self, method: str, request: Message, reply: type[R], timeout: float | None) -> AsyncGenerator[R]:
        call = self._channel.unary_stream(f"/{SERVICE}/{method}", None, None)(
            request.SerializeToString(), timeout=timeout
        )
        try:
            async for raw in call:
                yield _parsed(reply, raw)
        except grpc.aio.AioRpcError as error:
            raise self._problem(error, timeout) from error
        finally:
            call.cancel()

    async def _end_of(self, call: grpc.aio.StreamStreamCall[bytes, bytes], timeout: float) -> Exception:
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return self._problem(error, timeout)
        return Unreachable("it ended the stream")

    def _problem(self, error: grpc.aio.AioRpcError, timeout: float | None) -> Exception:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return NoLease(error.details())
        if error.code() in _NO:
            return Refused(error.details())
        connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
        return Unreachable(lost("coordinator", error, self.address, True, timeout, connected).reason)


def _parsed(kind: type[R], raw: bytes) -> R:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise Unreachable("its answer is not valid") from error


FILE = "coordinator.json"
LOOK = 10.0
"""Seconds to connect and read the server's key."""
ANSWER = 20.0
PATIENCE = 300.0
"""Seconds to keep trying a coordinator that does not answer."""


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


async def patiently(what: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the coordinator until it answers. Raises Unreachable: it has not within PATIENCE seconds.

    Args:
        what: is the matter meanwhile, as the log says it.
    """
    attempts = Attempts(what, PATIENCE)
    while True:
        try:
            return await ask()
        except Unreachable as problem:
            if not await attempts.failed(str(problem)):
                raise


async def enrol_patiently(address: str, invite: Invite, identity: Identity, name: str) -> tuple[Enrolment, RunConfig]:
    """Call `enrol` until the coordinator answers or PATIENCE seconds have passed. Raises PierError."""
    try:
        return await patiently("the coordinator does not answer yet", partial(enrol, address, invite, identity, name))
    except Unreachable as problem:
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
    own = Credentials(pem(leaf), invite.certificate, key_pem(invite.key))
    link = Link(address, coordinator, own)
    try:
        reply = await link.enrol(_request(identity, invite, name), ANSWER)
    except Refused as refused:
        problem = f"the coordinator at {address} does not let this site in: {refused}"
        new = "Ask its operator for a new invite: `pier-coordinator invite` prints one."
        raise PierError(problem, new if "invite" in str(refused) else "") from refused
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
    public = public_der(identity.key.public_key())
    shown = x509.load_pem_x509_certificate(invite.certificate).public_bytes(serialization.Encoding.DER)
    proof = identity.key.sign(shown, ALGORITHM)
    return EnrolRequest(protocol=PROTOCOL, name=name, public_key=public, proof=proof, time=time.time())


def _checked(reply: EnrolReply, identity: Identity, address: str, node: str) -> tuple[Enrolment, RunConfig]:
    try:
        check_issued(reply.certificate, reply.authority, identity)
    except ValueError as error:
        raise PierError(f"{address}: the coordinator's answer is not valid: {error}", "Tell its operator.") from error
    enrolment = Enrolment(address, node, reply.authority.decode(), reply.certificate.decode())
    return enrolment, from_canonical(reply.run_config)
