"""The asking side of the hivemind carrier: a line to each peer, a stream per question, and failures as PeerLost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NoReturn, TypeVar

from google.protobuf.message import Message

from pier_node.base.tasks import cancel_and_wait, first_of
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import DESCRIBE, BadMessage, Method, PeerLost
from pier_node.wire.grpc.options import EXCHANGE, FETCH, MANIFEST_BYTES, MESSAGE_BYTES, REPLY_BYTES
from pier_node.wire.libp2p.dial import NoWay
from pier_node.wire.libp2p.host import Host
from pier_node.wire.libp2p.stream import LINE, CutOff, Kind, Stream, answer, ending, held, opening, shown
from pier_node.wire.multiaddr import parse_routes
from pier_proto.v1.peer_pb2 import Chunk, FetchRequest

CONNECT_SECONDS = 20.0
CLOSED = "this node closed the connection"
CUT_OFF = "the connection was cut off"

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Link:
    """The way to one peer or, with `node` None, to whichever node listens at an address: a line, opened on demand.

    Args:
        address: multiaddrs of the peer; any other text raises PeerLost at the first use.
    """

    def __init__(self, host: Host, node: str | None, address: str) -> None:
        self.node, self.address = node, address
        self._host = host
        self._why = ""
        self._line: asyncio.Task[tuple[str, bytes]] | None = None
        self._streams: set[Stream] = set()
        self._helpers: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(self, method: Method[Q, R], request: Q, timeout: float) -> tuple[str, R]:
        """The node that answered, and its answer. Raises PeerLost."""
        node = ""
        most = MANIFEST_BYTES if method is DESCRIBE else REPLY_BYTES
        try:
            async with asyncio.timeout(timeout):
                node, peer = await self._connected()
                async with self._stream(peer, method.name) as stream:
                    await stream.send(Kind.MESSAGE, request.SerializeToString())
                    return node, parse(method.reply, await answer(stream, self._name, most))
        except TimeoutError:
            no_answer = f"no answer within {timeout:.3g} s"
            no_connection = f"no connection within {timeout:.3g} s: it is down, or behind a firewall"
            raise self._lost(no_answer if node else no_connection) from None

    async def push(self, chunks: AsyncIterator[Chunk], count: Callable[[int], None]) -> None:
        """Stream chunks, and `count` their payload bytes; return once the peer took them all. Raises PeerLost."""
        _, peer = await self._connected()
        async with self._stream(peer, EXCHANGE) as stream:
            verdict = asyncio.create_task(stream.receive(0))
            verdict.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                whole = await _poured(chunks, stream, verdict, count)
                kind, reason = await verdict
            finally:
                await cancel_and_wait(verdict)
            if kind in (Kind.REFUSED, Kind.FAILED):
                raise ending(kind, reason, self._name)
        if not whole:
            raise self._lost("it took only a part of the stream")

    async def pull(self, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream what the peer sends. Raises PeerLost."""
        _, peer = await self._connected()
        async with self._stream(peer, FETCH) as stream:
            await stream.send(Kind.MESSAGE, request.SerializeToString())
            while True:
                kind, body = await stream.receive(MESSAGE_BYTES)
                if kind is Kind.END:
                    return
                if kind is not Kind.MESSAGE:
                    raise ending(kind, body, self._name)
                yield parse(Chunk, body)

    async def close(self) -> None:
        """Close the line; all calls in progress raise PeerLost."""
        self._lose(CLOSED)
        if not self._closed.done():
            self._closed.set_result(None)
        await cancel_and_wait(*self._helpers, *([self._line] if self._line else []))

    # --- the line ------------------------------------------------------------------------------

    async def _connected(self) -> tuple[str, bytes]:
        """The node and its peer id, once a line to it is open. Raises PeerLost within CONNECT_SECONDS."""
        if self._closed.done():
            raise self._lost(CLOSED)
        if self._line is None or (self._line.done() and (self._line.cancelled() or self._line.exception())):
            self._line = asyncio.create_task(self._opened())
            self._line.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await first_of(self._until_closed(), asyncio.shield(self._line))

    async def _until_closed(self) -> NoReturn:
        await asyncio.shield(self._closed)
        raise self._lost(CLOSED)

    async def _opened(self) -> tuple[str, bytes]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                peer = await self._found()
                async with self._translated():
                    stream = await self._host.stream(peer, LINE)
                    try:
                        node = await self._met(stream, peer)
                    except BaseException:
                        stream.close()
                        raise
        except NoWay as error:
            raise self._lost(str(error)) from error
        except ValueError as error:
            raise self._lost(f"this node is on libp2p and knows no way there: {error}") from error
        except TimeoutError:
            raise self._lost("no connection: it is down, or behind a firewall") from None
        self._why = ""
        self._host.discovery.meet(peer)
        holder = asyncio.create_task(self._hold(stream))
        self._helpers.add(holder)
        holder.add_done_callback(self._helpers.discard)
        return node, peer

    async def _found(self) -> bytes:
        """Connect to the peer's last known or newly published address; return its peer id. Raises NoWay."""
        try:
            return await self._host.connect(parse_routes(self.address))
        except NoWay:
            moved = await self._host.discovery.find(self.node) if self.node else ""
            if moved in ("", self.address):
                raise
            return await self._host.connect(parse_routes(moved))

    async def _met(self, stream: Stream, peer: bytes) -> str:
        host = self._host
        await stream.send(Kind.MESSAGE, opening(host.metadata, self.node, host.identity_proof).SerializeToString())
        identity_proof = await shown(stream, self._name)
        try:
            node = host.bearer(identity_proof, peer)
        except ValueError as error:
            raise self._lost(f"whoever answers there does not prove who it is: {error}") from error
        if self.node not in (None, node):
            raise self._lost(f"node {node} answers there")
        return node

    async def _hold(self, line: Stream) -> None:
        try:
            self._lose(await held(line))
        finally:
            line.close()

    def _lose(self, why: str) -> None:
        self._why = self._why or why
        if self._line is not None and self._line.done():
            self._line = None
        for stream in self._streams:
            stream.close()

    # --- a stream ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stream(self, peer: bytes, name: str) -> AsyncGenerator[Stream]:
        async with self._translated():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    stream = await self._host.stream(peer, name)
            except TimeoutError:
                raise self._lost("the connection went silent") from None
            self._streams.add(stream)
            try:
                yield stream
            finally:
                self._streams.discard(stream)
                stream.close()

    @asynccontextmanager
    async def _translated(self) -> AsyncGenerator[None]:
        try:
            yield
        except CutOff as error:
            self._lose(CUT_OFF)  # otherwise p2pd would dial in vain, and then not again for seconds
            raise self._lost(self._why) from error
        except NoWay as error:
            raise self._lost(str(error)) from error
        except BadMessage as error:
            raise self._lost(f"its answer is not valid: {error}") from error

    def _lost(self, reason: str) -> PeerLost:
        return PeerLost(self._name, f"{self.address}: {reason}")

    @property
    def _name(self) -> str:
        return self.node or self.address


async def _poured(
    chunks: AsyncIterator[Chunk],
    stream: Stream,
    verdict: asyncio.Task[tuple[Kind, bytes]],
    count: Callable[[int], None],
) -> bool:
    """Send chunks until the peer has answered; return whether all of them were sent."""
    with suppress(CutOff):  # the verdict says why
        async for chunk in chunks:
            if verdict.done():
                return False
            await stream.send(Kind.MESSAGE, chunk.SerializeToString())
            count(len(chunk.data))
        await stream.send(Kind.END)
        return True
    return False
