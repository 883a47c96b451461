"""What both carriers share: a link to each peer, a server with handlers, limits on calls, and the memory of chunks.

`Calls` limits the calls that a node answers at once, so that no peer takes all of its capacity.

`keep_chunk_memory` keeps freed chunks in the process. glibc returns a freed block of CHUNK_BYTES to the kernel, and a
chunk takes several such blocks on its way; faulting that memory in again costs half as much processor time on top. See
mallopt(3). A C library without mallopt needs nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from pier_node.wire.carrier import CHUNK_BYTES, HELLO, Handler, Method, PeerLost
from pier_node.wire.metadata import CallMetadata
from pier_proto.v1.peer_pb2 import Chunk, FetchRequest, HelloReply, HelloRequest

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_chunk_memory() -> None:
    """Keep up to 32 chunks of freed memory in this process, and allocate blocks below 4 chunks on its heap."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_THRESHOLD, 4 * CHUNK_BYTES)
        library.mallopt(_TRIM_THRESHOLD, 32 * CHUNK_BYTES)


CALLS = 4096
CALLS_PER_PEER = 64


class Busy(Exception):
    """A peer has as many calls in progress as a peer may have."""


class Calls:
    """The calls in progress, by peer."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """Hold a place for one call of a peer. Raises Busy."""
        if self._under_way[caller] >= CALLS_PER_PEER:
            raise Busy(f"{CALLS_PER_PEER} calls of {caller} are under way already")
        self._under_way[caller] += 1
        try:
            yield
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]


Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Link(Protocol):
    """The way to one peer."""

    address: str

    async def ask(self, method: Method[Q, R], request: Q, timeout: float) -> tuple[str, R]:
        """The node that answered, and its answer. Raises PeerLost."""

    async def push(self, chunks: AsyncIterator[Chunk], count: Callable[[int], None]) -> None:
        """Stream chunks, and `count` their payload bytes. Raises PeerLost."""

    def pull(self, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream what the peer sends. Raises PeerLost."""

    async def close(self) -> None:
        """Close the link; all calls in progress raise PeerLost."""


class Server(Protocol):
    """Serves the handlers that it is given."""

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method."""

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        """Receive streams."""

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        """Serve streams."""

    async def stop(self) -> None:
        """End all calls in progress."""


class Tally:
    """Payload bytes, counted by the peer that they went to."""

    def __init__(self) -> None:
        self.by_peer: Counter[str] = Counter()

    def add(self, peer: str, size: int) -> None:
        """Add to a peer's count."""
        self.by_peer[peer] += size


class LinkedCarrier:
    """A Carrier made of links and a server.

    Args:
        metadata: this node's metadata, which the links and the server show.
        connect: creates a link to a node at an address; None as the node means whichever node listens there.
        sent: counts the server's payload bytes.
    """

    def __init__(
        self, metadata: CallMetadata, connect: Callable[[str | None, str], Link], server: Server, sent: Tally
    ) -> None:
        self.node, self._metadata = metadata.node, metadata
        self._connect, self._answers, self._sent = connect, server, sent
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def stop(self) -> None:
        """Close all connections and stop listening within two seconds; all calls in progress fail."""
        self._stopped = True
        await asyncio.gather(self._answers.stop(), *(link.close() for link in self._links.values()), *self._closing)

    def introduce(self, node: str, address: str) -> None:
        """Remember (or change) the address of a peer."""
        known = self._links.get(node)
        if known is not None and known.address == address:
            return
        self._links[node] = self._connect(node, address)
        if known is not None:
            self._close(known)

    def forget(self, node: str) -> None:
        """Close the link to a peer that will not be asked again."""
        if link := self._links.pop(node, None):
            self._close(link)

    def refuse(self, nodes: Iterable[str], why: str) -> None:
        """Refuse all contact with these nodes from now on and tell them why; their calls in progress fail."""
        self._metadata.put_out.update(dict.fromkeys(nodes, why))
        for node in self._metadata.put_out.keys() & self._links.keys():
            self.forget(node)

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        """Say hello to the node that listens at an address. Raises PeerLost."""
        link = self._connect(None, address)
        try:
            node, reply = await link.ask(HELLO, request, timeout)
        finally:
            await link.close()
        if reply.site.node != node:
            raise PeerLost(address, f"{address}: node {node} calls itself {reply.site.node}")
        return reply

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Ask a peer. Raises PeerLost if no answer comes within `timeout` seconds, PeerRefused if the peer says no."""
        _, reply = await self._link(peer).ask(method, request, timeout)
        return reply

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        """Stream chunks to a peer with back-pressure; return once it took them all. Raises PeerLost.

        There is no deadline while the connection is alive; a silent connection is given up after 40 s. The caller sets
        a limit.
        """
        await self._link(peer).push(chunks, partial(self._sent.add, peer))

    async def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream a piece of a peer's state. The iterator raises PeerLost; like `push`, it has no deadline."""
        async with aclosing(self._link(peer).pull(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method. The handler raises BadMessage to refuse, and is cancelled when the caller goes away."""
        self._answers.serve(method, handler)

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        """Receive the streams that peers push; one that is cut off raises PeerLost in the handler."""
        self._answers.serve_push(handler)

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        """Serve the streams that peers pull."""
        self._answers.serve_pull(handler)

    def bytes_sent(self) -> int:
        """Payload bytes that this site has sent so far, over all streams."""
        return self._sent.by_peer.total()

    def bytes_sent_to(self, peer: str) -> int:
        """Payload bytes sent to one peer so far."""
        return self._sent.by_peer[peer]

    def _close(self, link: Link) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _link(self, peer: str) -> Link:
        if self._stopped:
            raise PeerLost(peer, "this node is stopping")
        if peer not in self._links:
            raise PeerLost(peer, "nobody said yet where it is reached")
        return self._links[peer]
