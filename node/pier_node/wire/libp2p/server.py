"""The answering side of the hivemind carrier: admits peers, checks what they send, and reports what went wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import Message

from pier_node.base.address import format_address
from pier_node.base.tasks import first_of
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import HELLO, BadMessage, Handler, Method, PeerLost
from pier_node.wire.grpc.options import EXCHANGE, FETCH, MESSAGE_BYTES
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.grpc.server import GRACE, PATIENCE
from pier_node.wire.libp2p.host import Host
from pier_node.wire.libp2p.stream import KEEPALIVE, LINE, NAME_BYTES, OPENING_BYTES, CutOff, Kind, Stream, headers
from pier_node.wire.links import CALLS, Busy, Calls
from pier_node.wire.metadata import Headers, NotAdmitted
from pier_proto.v1.peer_pb2 import Chunk, FetchRequest, HelloReply, ProbeRequest
from pier_proto.v1.stream_pb2 import Opening

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
T = TypeVar("T")

STRANGERS = 256
"""Most streams of peers that have no line yet: one each, to open it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """A peer that has a line to this node, and what it said of itself, which is proved.

    Attributes:
        peer: its libp2p peer id.
        seen_as: HOST:PORT that it is connected from; "" through a relay.
    """

    node: str
    peer: bytes
    said: Headers
    certificate: bytes | None
    seen_as: str


class PeerServer:
    """Serves the handlers that it is given.

    Args:
        count: called with the peer and the payload bytes of every chunk that the peer pulled.
    """

    def __init__(self, host: Host, count: Callable[[str, int], None]) -> None:
        self._host, self._count = host, count
        self._answers: dict[str, Callable[[Caller, Stream], Awaitable[None]]] = {LINE: self._hold_line}
        self._callers: dict[bytes, list[Caller]] = {}
        self._calls = Calls()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._strangers: set[asyncio.Task[Any]] = set()
        self.serve_push(_not_yet)

    # --- what is served ------------------------------------------------------------------------

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method."""

        async def answer(caller: Caller, stream: Stream) -> None:
            request = parse(method.request, await _message(stream, MESSAGE_BYTES))
            if isinstance(request, ProbeRequest):
                request.seen_as = caller.seen_as
            reply = await first_of(handler(caller.node, request), _until_gone(stream))
            if isinstance(reply, HelloReply):
                reply.seen_as = caller.seen_as
            await stream.send(Kind.MESSAGE, reply.SerializeToString())

        self._answers[method.name] = answer

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        """Receive streams. A handler whose caller is gone gets PeerLost from the stream."""

        async def take(caller: Caller, stream: Stream) -> None:
            chunks = _chunks(caller.node, stream)
            await handler(caller.node, chunks)
            async for _ in chunks:
                raise BadMessage("more chunks than were expected")
            await stream.send(Kind.END)

        self._answers[EXCHANGE] = take

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        """Serve streams. A handler whose caller is gone is cancelled."""

        async def give(caller: Caller, stream: Stream) -> None:
            request = parse(FetchRequest, await _message(stream, MESSAGE_BYTES))
            await first_of(self._given(caller.node, handler(caller.node, request), stream), _until_gone(stream))
            await stream.send(Kind.END)

        self._answers[FETCH] = give

    async def _given(self, peer: str, chunks: AsyncIterator[Chunk], stream: Stream) -> None:
        try:
            async for chunk in chunks:
                await stream.send(Kind.MESSAGE, chunk.SerializeToString())
                self._count(peer, len(chunk.data))
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    # --- a stream ------------------------------------------------------------------------------

    async def handle(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by p2pd for each stream that a peer opens; never raises."""
        stream, known = Stream(reader, writer), info.peer_id.to_bytes() in self._callers
        places, most = (self._tasks, CALLS) if known else (self._strangers, STRANGERS)
        if len(places) < most:
            task = asyncio.create_task(self._answer(info, stream))
            places.add(task)
            await asyncio.wait({task})
            places.discard(task)
        stream.close()

    async def stop(self) -> None:
        """End all calls in progress."""
        work = self._tasks | self._strangers
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work, timeout=GRACE)

    async def _answer(self, info: Any, stream: Stream) -> None:
        method = ""
        try:
            method = (await _message(stream, NAME_BYTES, PATIENCE)).decode(errors="replace")
            caller = await self._meet(info, stream) if method == LINE else self._known(info.peer_id, method)
            if method not in self._answers:
                raise BadMessage("it does not answer that, or not yet")
            with nullcontext() if method == LINE else self._calls.place(caller.node):  # a line stays open
                await self._answers[method](caller, stream)
        except CutOff:
            return  # the caller is gone
        except Exception as error:
            if not isinstance(error, (*_REFUSALS, PeerLost)):
                log.exception("%s, asked by libp2p peer %s, failed", ascii(method)[1:-1], info.peer_id)
            with suppress(CutOff, TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await stream.send(*_told(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await stream.gone()  # the asker closes the stream; otherwise the last frame might not arrive

    # --- who is there --------------------------------------------------------------------------

    async def _meet(self, info: Any, stream: Stream) -> Caller:
        """The node that a peer opening a line proves to be. Raises NotAdmitted."""
        opened, peer = parse(Opening, await _message(stream, OPENING_BYTES, PATIENCE)), info.peer_id.to_bytes()
        said, certificate = headers(opened), opened.identity_proof.certificate or None
        try:
            self._host.bearer(opened.identity_proof, peer)
        except ValueError as error:
            raise NotAdmitted(f"the caller is not let in: {error}") from error
        node = self._host.metadata.admit(HELLO.name, said, certificate)
        return Caller(node, peer, said, certificate, _seen_as(info.addr))

    def _known(self, peer: Any, method: str) -> Caller:
        """The node that a peer with a line has proved to be. Raises NotAdmitted, PeerLost."""
        lines = self._callers.get(peer.to_bytes())
        if not lines:
            raise PeerLost(str(peer), "it asks before it has said who it is")
        self._host.metadata.admit(method, lines[-1].said, lines[-1].certificate)
        return lines[-1]

    async def _hold_line(self, caller: Caller, stream: Stream) -> None:
        self._callers.setdefault(caller.peer, []).append(caller)
        try:
            await stream.send(Kind.MESSAGE, self._host.identity_proof.SerializeToString())
            async with asyncio.timeout(None) as patience:
                while True:
                    patience.reschedule(asyncio.get_running_loop().time() + 3 * KEEPALIVE)
                    await stream.receive(0)
                    await stream.send(Kind.PING)
        except TimeoutError as error:
            raise CutOff from error
        finally:
            self._callers[caller.peer].remove(caller)
            if not self._callers[caller.peer]:
                del self._callers[caller.peer]


async def _not_yet(_caller: str, _chunks: AsyncIterator[Chunk]) -> None:
    raise BadMessage("no streams are taken here yet")


async def _message(stream: Stream, most: int, seconds: float = 2 * KEEPALIVE) -> bytes:
    """The message that must come next. Raises BadMessage, CutOff."""
    try:
        async with asyncio.timeout(seconds):
            kind, body = await stream.receive(most)
    except TimeoutError as error:
        raise BadMessage(f"nothing came within {seconds:.0f} s") from error
    if kind is not Kind.MESSAGE:
        raise BadMessage(f"a frame of kind {kind.name} where a message belongs")
    return body


async def _chunks(sender: str, stream: Stream) -> AsyncGenerator[Chunk]:
    while True:
        try:
            kind, body = await stream.receive(MESSAGE_BYTES)
        except CutOff as error:
            raise PeerLost(sender, "its stream was cut off") from error
        if kind is Kind.END:
            return
        if kind is not Kind.MESSAGE:
            raise BadMessage(f"a frame of kind {kind.name} where a chunk belongs")
        yield parse(Chunk, body)


async def _until_gone(stream: Stream) -> NoReturn:
    """Raises CutOff once the caller has gone away."""
    await stream.gone()
    raise CutOff


def _told(error: Exception) -> tuple[Kind, bytes]:
    """The frame that tells a caller what went wrong."""
    known = isinstance(error, (*_REFUSALS, PeerLost))
    reason = str(error) if known else f"it failed to answer, see its log: {type(error).__name__}"
    return Kind.REFUSED if isinstance(error, _REFUSALS) else Kind.FAILED, brief(reason).encode()


_REFUSALS = (NotAdmitted, BadMessage, Busy)


def _seen_as(address: Any) -> str:
    """HOST:PORT of the other end of a connection, from its multiaddr; "" through a relay."""
    if "p2p-circuit" in address or "tcp" not in address:
        return ""
    return format_address(address["ip6" if "ip6" in address else "ip4"], int(address["tcp"]))
