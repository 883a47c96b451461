"""The gRPC carrier: fast, direct connections between sites with mutual TLS. wire/carrier.py says what a carrier does.

Link is the asking side: it connects to a peer, makes calls and streams, and reports failures as PeerLost. GrpcCarrier
is the answering side, too: it admits callers, checks what they send, and turns failures into statuses. gRPC's settings
are here with their reasons; https://github.com/grpc/grpc/blob/master/include/grpc/impl/channel_arg_names.h lists them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio

from pier_node.base.address import format_address, parse_address
from pier_node.base.errors import PierError
from pier_node.base.tasks import first_of, unwatched
from pier_node.identity import tls
from pier_node.identity.certificates import Credentials
from pier_node.wire import links
from pier_node.wire.addresses import Choice, choose_address, first_hop, free_port
from pier_node.wire.bounds import parse, parse_chunk
from pier_node.wire.carrier import (
    DESCRIBE,
    EXCHANGE,
    FETCH,
    GATHER,
    KEEPALIVE,
    MESSAGE_BYTES,
    REPLY_BYTES,
    BadMessage,
    Chunk,
    Method,
    PeerLost,
    Q,
    R,
)
from pier_node.wire.grpc.reasons import brief, lost
from pier_proto.v1.peer_pb2 import Ack, FetchRequest

log = logging.getLogger(__name__)

SERVICE = "pier.v1.Peer"
END = b""
"""Closes a pushed stream. The receiver's library cannot tell a stream that was cut off from a complete one."""

CALLS_PER_CONNECTION = 64
LONG = (DESCRIBE, GATHER)
"""Methods whose answers may be longer than others."""

_BOTH: dict[str, int] = {
    # A NAT or firewall silently forgets an idle connection after about a minute.
    "grpc.keepalive_time_ms": int(1000 * KEEPALIVE),
    "grpc.keepalive_timeout_ms": int(1000 * KEEPALIVE),
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
}
_SERVER: dict[str, int] = {
    "grpc.so_reuseport": 0,  # a port in use is an error, not a second server that takes half of the calls
    "grpc.max_concurrent_streams": CALLS_PER_CONNECTION,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,  # otherwise the pings of idle peers are "too many"
    "grpc.http2.max_ping_strikes": 0,
}
_CLIENT: dict[str, int | str] = {
    "grpc.max_receive_message_length": max(method.most for method in LONG),
    "grpc.service_config": json.dumps(
        {
            "methodConfig": [
                {"name": [{}], "maxResponseMessageBytes": REPLY_BYTES},
                *(
                    {"name": [{"service": SERVICE, "method": method.name}], "maxResponseMessageBytes": method.most}
                    for method in LONG
                ),
            ]
        }
    ),
    "grpc.enable_retries": 0,  # only code that knows the question can decide whether to ask again
    "grpc.enable_http_proxy": 0,  # a proxy set for the web cannot reach peers
    "grpc.use_local_subchannel_pool": 1,  # each channel has its own connection
    # A peer that comes back is found within a second; a connection attempt may take five seconds.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.min_reconnect_backoff_ms": 5_000,
    "grpc.dns_min_time_between_resolutions_ms": 1_000,
}

NO_PROBES = ("grpc.http2.bdp_probe", 0)
"""Turns off gRPC's bandwidth probes: they serve large messages, and would add two pings to each small one."""
CHANNEL_OPTIONS = [*_BOTH.items(), *_CLIENT.items()]
"""Options of a channel to a peer."""


def server_options(most: int) -> list[tuple[str, int]]:
    """Options of a server that takes messages of `most` bytes."""
    return [*_BOTH.items(), *_SERVER.items(), ("grpc.max_receive_message_length", most)]


ACK = Ack().SerializeToString()

Context = grpc.aio.ServicerContext[bytes, bytes]


async def _messages(sender: str, stream: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    async for raw in stream:
        if raw == END:
            return
        yield raw
    raise PeerLost(sender, "its stream was cut off")


async def _outliving_the_call(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that learns from its stream that the caller is gone; cancel it only if it does not."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=links.GRACE)
        if not task.cancel() and not task.cancelled():
            task.exception()
        raise


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Let a caller find out that it was answered early, so that it stops sending."""
    with suppress(TimeoutError):
        async with asyncio.timeout(links.PATIENCE):
            async for _ in stream:
                pass


async def _refuse(context: Context, error: Exception) -> NoReturn:
    code = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    text = type(error).__name__ if code is grpc.StatusCode.INTERNAL else str(error)
    await context.abort(code, brief(text))


_STATUSES = {
    links.NotAdmitted: grpc.StatusCode.FAILED_PRECONDITION,
    BadMessage: grpc.StatusCode.INVALID_ARGUMENT,
    links.Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerLost: grpc.StatusCode.ABORTED,
}


def _seen_as(peer: str) -> str:
    """HOST:PORT from gRPC's name of a connection, such as ipv4:10.0.0.1:5000 or ipv6:%5B::1%5D:5000."""
    return unquote(peer.partition(":")[2])


T = TypeVar("T")


class Link:
    """The way to one peer or, if `node` is None, to whichever node listens at an address: two connections, on demand.

    Questions and streams have separate connections, since a full send buffer takes seconds to drain over a slow link.
    """

    def __init__(
        self, metadata: links.CallMetadata, credentials: Credentials | None, node: str | None, address: str
    ) -> None:
        self.node, self.address, self._metadata, self._credentials = node, address, metadata, credentials
        self._channels: list[grpc.aio.Channel] = []
        self._calls: set[grpc.aio.Call] = set()

    async def ask(self, method: Method[Q, R], request: Q, timeout: float) -> tuple[str, R]:
        """The node that answered, and its answer. Raises PeerLost."""
        headers = self._metadata.call(self.node)
        call = self._questions.unary_unary(_path(method.name), None, None)(
            request.SerializeToString(), timeout=timeout, metadata=_metadata(headers)
        )
        with self._under_way(call), self._losses(self._questions, timeout):
            raw = await call
            node = self._answerer(headers, await call.initial_metadata())
        return node, self._checked(partial(parse, method.reply), raw)

    async def push(self, chunks: AsyncIterator[Chunk], count: Callable[[int], None]) -> None:
        """Stream chunks, and `count` their payload bytes; return once the peer took them all. Raises PeerLost."""
        headers = self._metadata.call(self.node)
        call = self._streams.stream_stream(_path(EXCHANGE), None, None)(None, metadata=_metadata(headers))
        answer, whole = unwatched(call.read()), False
        with self._under_way(call):
            with self._losses(self._streams):  # grpc.aio reports an early cancellation only to readers
                await first_of(call.wait_for_connection(), asyncio.wait([answer]))
            async for chunk in chunks:
                if answer.done():  # the peer does not want the rest; the status says why
                    break
                with self._losses(self._streams):
                    await _write(call, chunk.encoded())
                count(len(chunk.data))
            else:
                with self._losses(self._streams):
                    await _write(call, END)
                whole = True
            with self._losses(self._streams):
                await call.done_writing()
                await answer
                await call.read()
                self._answerer(headers, await call.initial_metadata())
        if not whole:
            raise self._lost(f"{self.address}: it took only a part of the stream")

    async def pull(self, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream what the peer sends. Raises PeerLost."""
        headers = self._metadata.call(self.node)
        call = self._streams.unary_stream(_path(FETCH), None, None)(
            request.SerializeToString(), metadata=_metadata(headers)
        )
        proven = ""
        with self._under_way(call), self._losses(self._streams):
            async for raw in call:
                proven = proven or self._answerer(headers, await call.initial_metadata())
                yield self._checked(parse_chunk, raw)

    async def close(self) -> None:
        """Close the connections; all calls in progress raise PeerLost."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    @contextmanager
    def _under_way(self, call: grpc.aio.Call) -> Iterator[None]:
        """End a call with the block that needs it, or with this link: closing a channel does not end all its calls."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            call.cancel()

    @cached_property
    def _questions(self) -> grpc.aio.Channel:
        return self._connect()

    @cached_property
    def _streams(self) -> grpc.aio.Channel:
        return self._connect()

    def _connect(self) -> grpc.aio.Channel:
        channel = tls.channel(self.address, self.node, self._credentials, CHANNEL_OPTIONS)
        self._channels.append(channel)
        return channel

    def _answerer(self, headers: links.Headers, answer: grpc.aio.Metadata) -> str:
        try:
            node = self._metadata.answered(headers, dict(answer))
        except ValueError as error:
            raise self._lost(f"{self.address}: whoever answers there does not prove who it is: {error}") from error
        if self.node not in (None, node):
            raise self._lost(f"{self.address}: node {node} answers there")
        return node

    def _checked(self, parsed: Callable[[bytes], T], raw: bytes) -> T:
        try:
            return parsed(raw)
        except BadMessage as error:
            raise self._lost(f"{self.address}: its answer is not valid: {error}") from error

    @contextmanager
    def _losses(self, channel: grpc.aio.Channel, timeout: float | None = None) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            connected = channel.get_state() is grpc.ChannelConnectivity.READY
            secure = self._credentials is not None
            raise lost(self._name, error, self.address, secure, timeout, connected) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._lost(f"{self.address}: this node closed the connection") from None

    def _lost(self, reason: str) -> PeerLost:
        return PeerLost(self._name, reason)

    @property
    def _name(self) -> str:
        return self.node or self.address


def _path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def _metadata(headers: links.Headers) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(*headers.items())


async def _write(call: grpc.aio.StreamStreamCall[bytes, bytes], message: bytes) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # the call has ended; read() tells why
        await call.read()


class GrpcCarrier(links.SiteCarrier, grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A Carrier over gRPC; without credentials, it does so without TLS. `make_carrier` describes the arguments."""

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None) -> None:
        super().__init__(links.CallMetadata(node, run_hash, credentials.key if credentials else None))
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None

    def connect(self, node: str | None, address: str) -> Link:
        """A link to a node at an address; None as the node means whichever node listens there."""
        return Link(self._metadata, self._credentials, node, address)

    # --- start and stop ------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; the system chooses one if `port` is 0. Raises PierError."""
        links.keep_chunk_memory()
        self._server = grpc.aio.server(options=server_options(MESSAGE_BYTES), maximum_concurrent_rpcs=links.CALLS)
        self._server.add_generic_rpc_handlers((self,))
        address = format_address(host, port)
        try:
            bound = tls.add_port(self._server, address, self._credentials)
        except RuntimeError as error:
            free_port(host, port)  # it says why not, which gRPC does not
            raise PierError(f"gRPC cannot listen on {address}", "Choose another with --listen HOST:PORT.") from error
        await self._server.start()
        return bound

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others; see wire/addresses.py. Raises PierError."""
        host, port = parse_address(at)
        port = await self.start(host, port)
        return choose_address([first_hop(peer) for peer in peers], advertise, format_address(host, port))

    async def stop_answering(self) -> None:
        """Stop listening, and end all calls that are being answered."""
        if self._server is not None:
            await self._server.stop(links.GRACE)

    # --- what is served ------------------------------------------------------------------------

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Find a method for gRPC."""
        service, _, name = details.method.removeprefix("/").partition("/")
        if service != SERVICE or not self.knows(name):
            return None
        if name == EXCHANGE:
            return grpc.stream_stream_rpc_method_handler(self._take)
        if name == FETCH:
            return grpc.unary_stream_rpc_method_handler(self._give)

        async def answer(raw: bytes, context: Context) -> bytes:
            async with self._admitted(name, context) as caller:
                return await self.answer(name, caller, raw, _seen_as(context.peer()))

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _take(self, stream: AsyncIterator[bytes], context: Context) -> None:
        async with self._admitted(EXCHANGE, context, stream) as caller:
            await _outliving_the_call(self.take(caller, _messages(caller, stream)))
            await context.write(ACK)

    async def _give(self, raw: bytes, context: Context) -> None:
        async with self._admitted(FETCH, context) as caller, aclosing(self.give(caller, raw)) as messages:
            async for message in messages:
                await links.taken(context.write(message))

    # --- a call --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(
        self, method: str, context: Context, stream: AsyncIterator[bytes] | None = None
    ) -> AsyncGenerator[str]:
        """The caller's node id while its call is in progress; failures end the call with a status.

        A caller that is still sending would not see the status, so its `stream` is first answered and allowed to end.
        """
        try:
            headers: links.Headers = dict(context.invocation_metadata() or ())
            caller = self._metadata.admit(method, headers, tls.caller_certificate(context))
            with self.place(caller):
                await context.send_initial_metadata(tuple(self._metadata.answer(caller, headers).items()))
                yield caller
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            if not isinstance(error, tuple(_STATUSES)):
                log.exception("%s, asked by %s, failed", method, context.peer())
            if stream is not None:
                await context.write(ACK)
                await _drain(stream)
            await _refuse(context, error)
