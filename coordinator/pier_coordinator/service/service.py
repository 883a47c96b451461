"""The gRPC service `pier.v1.Coordinator`: identifies callers, checks requests and turns refusals into status codes.

A token bucket for each caller and method limits the rate of calls, so that no site can crowd out the others.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from pier_coordinator.identity.home import Authority
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.runs.sites import LEASE_SECONDS
from pier_coordinator.service.bounds import MESSAGE_BYTES, parse
from pier_coordinator.service.reception import Reception
from pier_coordinator.store.sites import Refused, Stranger, Superseded, TooFast, Unregistered, WrongClock
from pier_node.base.address import format_address
from pier_node.identity.certificates import Credentials, node_id_of_certificate
from pier_node.identity.tls import Trust, caller_certificate, der
from pier_node.wire.addresses import free_port
from pier_node.wire.carrier import BadMessage
from pier_node.wire.grpc.carrier import NO_PROBES, server_options
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.links import GRACE
from pier_proto.v1 import coordinator_pb2 as pb
from pier_proto.v1.peer_pb2 import TokenizerRequest, WitnessRequest

SERVICE = "pier.v1.Coordinator"
CALLS = 4096
PUSHBACK = "grpc-retry-pushback-ms"
BUCKETS = 8192
"""Maximum number of buckets kept. The least recently used one is dropped: it would be full again by then."""
Q = TypeVar("Q", bound=Message)
R = TypeVar("R")
Context = grpc.aio.ServicerContext[bytes, bytes]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rate:
    """A rate limit: calls per second in the long run, and calls at once."""

    per_second: float
    burst: int


RATES: Mapping[str, Rate] = {
    "Enrol": Rate(2, 30),
    "Register": Rate(0.5, 10),
    "Tokenizer": Rate(2, 100),  # a start takes up to 64
    "Heartbeat": Rate(4, 20),
    "Watch": Rate(0.5, 10),
    "Witness": Rate(1, 50),  # a long proof comes in parts
    "Deliver": Rate(20, 200),  # one sheet per expert, domain and split
    "Arrived": Rate(20, 200),  # before each of them, and each checkpoint
    "GiveCheckpoint": Rate(0.5, 20),
    "FetchCheckpoint": Rate(0.5, 20),
    "Report": Rate(10, 60),  # records that a site kept while the coordinator was down come in a burst
}


@dataclass
class _Bucket:
    level: float
    filled: float


class Limits:
    """Counts calls and refuses those above the rates; `clock` is monotonic, in seconds."""

    def __init__(self, rates: Mapping[str, Rate] = RATES, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def count(self, caller: str, method: str) -> None:
        """Count a call. Raises TooFast."""
        rate, now = self._rates[method], self._clock()
        bucket = self._buckets.pop((caller, method), None) or _Bucket(rate.burst, now)
        self._buckets[caller, method] = bucket
        if len(self._buckets) > BUCKETS:
            self._buckets.popitem(last=False)
        bucket.level = min(rate.burst, bucket.level + (now - bucket.filled) * rate.per_second)
        bucket.filled = now
        if bucket.level < 1:
            seconds = (1 - bucket.level) / rate.per_second
            raise TooFast(
                f"{method}: more than {rate.per_second:g} calls a second; ask again in {seconds:.1f} s", seconds
            )
        bucket.level -= 1


class CoordinatorService(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Serves a coordinator, with its certificate and key."""

    def __init__(
        self, coordinator: Coordinator, own: Credentials, authority: Authority, limits: Limits | None = None
    ) -> None:
        self._coordinator = coordinator
        self._reception = Reception(coordinator, own, node_id_of_certificate(own.cert_pem), authority)
        self._limits = Limits() if limits is None else limits
        self._trust = Trust(own)
        self._trust.change(coordinator.invited())
        coordinator.invites_changed = self._trust.change
        self._server: grpc.aio.Server | None = None
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Enrol": grpc.unary_unary_rpc_method_handler(_answering(self._enrol)),
            "Register": self._member_method("Register", pb.RegisterRequest, self._reception.register),
            "Tokenizer": self._member_method("Tokenizer", TokenizerRequest, self._reception.tokenizer),
            "Heartbeat": grpc.stream_stream_rpc_method_handler(self._heartbeats),
            "Report": self._member_method("Report", pb.ReportRequest, self._reception.report),
            "Witness": self._member_method("Witness", WitnessRequest, coordinator.vote),
            "Deliver": grpc.stream_unary_rpc_method_handler(_answering(self._deliver)),
            "Arrived": self._member_method("Arrived", pb.ArrivedRequest, self._reception.arrived),
            "GiveCheckpoint": grpc.stream_stream_rpc_method_handler(self._give_checkpoint),
            "FetchCheckpoint": self._giving_method(
                "FetchCheckpoint", pb.FetchCheckpointRequest, self._reception.fetch_checkpoint
            ),
            "Watch": self._giving_method("Watch", pb.WatchRequest, self._reception.watch),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Look up a method; called by gRPC."""
        service, _, name = details.method.removeprefix("/").partition("/")
        return self._methods.get(name) if service == SERVICE else None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which the system chooses if `port` is 0. Raises PierError."""
        self._server = grpc.aio.server(
            options=[*server_options(MESSAGE_BYTES), NO_PROBES], maximum_concurrent_rpcs=CALLS
        )
        self._server.add_generic_rpc_handlers((self,))
        free_port(host, port)
        bound = self._trust.add_port(self._server, format_address(host, port))
        await self._server.start()
        return bound

    async def stop(self) -> None:
        """Stop listening and end all calls."""
        if self._server is not None:
            await self._server.stop(GRACE)

    # --- the methods ---------------------------------------------------------------------------

    async def _enrol(self, raw: bytes, context: Context) -> pb.EnrolReply:
        self._limits.count(context.peer().rpartition(":")[0], "Enrol")  # ipv4:10.0.0.1 of ipv4:10.0.0.1:5000
        return await self._reception.enrol(_certificate(context), parse(pb.EnrolRequest, raw))

    def _member_method(
        self, name: str, request: type[Q], handler: Callable[[str, Q], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A method for nodes of the run that answers one request with one reply."""

        async def reply(raw: bytes, context: Context) -> Message:
            node = self._member(context, name)
            return await handler(node, parse(request, raw))

        return grpc.unary_unary_rpc_method_handler(_answering(reply))

    async def _heartbeats(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer heartbeats until the site ends the stream, is silent or is refused.

        A stream counts as a call, too: otherwise a site's silent streams could use up all calls.
        """
        try:
            self._member(context, "Heartbeat")
            while isinstance(raw := await _within(LEASE_SECONDS, context), bytes):
                node = self._member(context, "Heartbeat")
                reply = await self._reception.heartbeat(node, parse(pb.HeartbeatRequest, raw))
                await context.write(reply.SerializeToString())
        except Exception as error:
            await _refuse(context, error)

    async def _deliver(self, _requests: AsyncIterator[bytes], context: Context) -> pb.DeliverReply:
        node = self._member(context, "Deliver")
        return await self._reception.deliver(node, _received(pb.DeliverRequest, context))

    async def _give_checkpoint(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        async def parts() -> AsyncIterator[pb.CheckpointPart]:
            coming = _received(pb.CheckpointPart, context)
            async for first in coming:
                yield first
                await context.write(pb.GiveCheckpointReply().SerializeToString())  # asks for the other parts
                break
            async for part in coming:
                yield part

        try:
            node = self._member(context, "GiveCheckpoint")
            reply = await self._reception.give_checkpoint(node, parts())
            await context.write(reply.SerializeToString())
        except Exception as error:
            await _refuse(context, error)

    def _giving_method(
        self, name: str, request: type[Q], handler: Callable[[str, Q], AsyncIterator[Message]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A method for nodes of the run that answers one request with a stream of messages."""

        async def answer(raw: bytes, context: Context) -> AsyncIterator[bytes]:
            try:
                node = self._member(context, name)
                async for message in handler(node, parse(request, raw)):
                    yield message.SerializeToString()
            except Exception as error:
                await _refuse(context, error)

        return grpc.unary_stream_rpc_method_handler(answer)

    def _member(self, context: Context, method: str) -> str:
        """The node id of a caller, which must be of the run; counts the call. Raises Stranger, TooFast."""
        pem = _certificate(context)
        if der(pem) in self._coordinator.invites:
            raise Stranger("an invite's certificate is for Enrol only: use the one that Enrol answered with")
        try:
            node = node_id_of_certificate(pem)
        except ValueError as error:
            raise Stranger(str(error)) from error
        self._coordinator.member(node)
        self._limits.count(node, method)
        return node


async def _within(seconds: float, context: Context) -> object:
    """The next message of a stream; None: it does not come in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await context.read()
    return None


async def _received(kind: type[Q], context: Context) -> AsyncIterator[Q]:
    """Yield the messages that arrive on a stream. Raises BadMessage."""
    while isinstance(raw := await context.read(), bytes):
        yield parse(kind, raw)


def _answering(reply: Callable[[R, Context], Awaitable[Message]]) -> Callable[[R, Context], Awaitable[bytes]]:
    """A gRPC handler that sends the reply, or the status that its exception stands for."""

    async def answer(request: R, context: Context) -> bytes:
        try:
            return (await reply(request, context)).SerializeToString()
        except Exception as error:
            await _refuse(context, error)

    return answer


async def _refuse(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.BaseError):
        raise error
    code = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL:
        log.error("a call of %s failed", context.peer(), exc_info=error)
    text = type(error).__name__ if code is grpc.StatusCode.INTERNAL else str(error)
    pushback = ((PUSHBACK, f"{error.seconds * 1000:.0f}"),) if isinstance(error, TooFast) else ()
    await context.abort(code, brief(text), pushback)


_STATUSES = {
    BadMessage: grpc.StatusCode.INVALID_ARGUMENT,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
    Stranger: grpc.StatusCode.PERMISSION_DENIED,
    Unregistered: grpc.StatusCode.NOT_FOUND,
    Superseded: grpc.StatusCode.ABORTED,
    WrongClock: grpc.StatusCode.ABORTED,  # the site trains on, and retries
    TooFast: grpc.StatusCode.RESOURCE_EXHAUSTED,
    sqlite3.Error: grpc.StatusCode.UNAVAILABLE,  # a full disk may have room again later: the site retries
}


def _certificate(context: Context) -> bytes:
    """The caller's certificate, PEM. Raises Stranger."""
    certificate = caller_certificate(context)
    if certificate is None:
        raise Stranger("the call came without a certificate")
    return certificate
