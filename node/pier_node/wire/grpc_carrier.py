"""The gRPC carrier: direct connections between sites, mutual TLS, fast. See carrier.py for what a carrier does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import Message

from pier.v1.peer_pb2 import Chunk, FetchRequest, HelloReply, HelloRequest
from pier_node.certificates import Credentials
from pier_node.wire.allocator import keep_chunk_memory
from pier_node.wire.card import Card
from pier_node.wire.carrier import HELLO, Handler, Method, PeerLost
from pier_node.wire.grpc_client import Link
from pier_node.wire.grpc_server import PeerServer

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class GrpcCarrier:
    """A Carrier over gRPC.

    Args:
        node: this node's id.
        run_hash: hash of the run's configuration; b"" as long as it is not known: only `greet` works then.
        credentials: what proves that this node is in the run; None: neither encrypted nor authenticated.
    """

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None) -> None:
        self.node = node
        self._credentials = credentials
        self._card = Card(node, run_hash, _key(credentials))
        self._server = PeerServer(self._card, credentials, self._count)
        self._sent = 0
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses if `port` is 0. Raises PierError."""
        keep_chunk_memory()
        return await self._server.start(host, port)

    async def stop(self) -> None:
        """Close all connections and stop listening, within two seconds; whatever is under way fails."""
        self._stopped = True
        await asyncio.gather(self._server.stop(), *(link.close() for link in self._links.values()), *self._closing)

    def introduce(self, node: str, address: str) -> None:
        """Remember (or change) where a peer is reached."""
        known = self._links.get(node)
        if known is not None and known.address == address:
            return
        self._links[node] = Link(self._card, self._credentials, node, address)
        if known is not None:
            task = asyncio.create_task(known.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        """Say hello to whoever listens at an address. Raises PeerLost."""
        link = Link(self._card, self._credentials, None, address)
        try:
            node, reply = await link.ask(HELLO, request, timeout)
        finally:
            await link.close()
        if reply.site.node != node:
            raise PeerLost(address, f"{address}: node {node} calls itself {reply.site.node}")
        return reply

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Ask a peer. Raises PeerLost when no answer came within `timeout` seconds, PeerRefused when it said no."""
        _, reply = await self._link(peer).ask(method, request, timeout)
        return reply

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        """Stream chunks to a peer with back-pressure; returns once it took them all. Raises PeerLost.

        It lasts as long as the connection does: one that went silent is given up after 40 s. Bound it from outside.
        """
        await self._link(peer).push(chunks, self._count)

    async def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream a piece of a peer's state. The iterator raises PeerLost; like `push` it has no deadline."""
        async with aclosing(self._link(peer).pull(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method. The handler raises BadMessage to refuse, and is cancelled when the caller goes away."""
        self._server.serve(method, handler)

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        """Take the streams that peers push; one that is cut off raises PeerLost in the handler."""
        self._server.serve_push(handler)

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        """Give the streams that peers pull."""
        self._server.serve_pull(handler)

    def bytes_sent(self) -> int:
        """Payload bytes of all streams so far, sent by this site."""
        return self._sent

    def _count(self, payload: int) -> None:
        self._sent += payload

    def _link(self, peer: str) -> Link:
        if self._stopped:
            raise PeerLost(peer, "this node is stopping")
        if peer not in self._links:
            raise PeerLost(peer, "nobody said yet where it is reached")
        return self._links[peer]


def _key(credentials: Credentials | None) -> ec.EllipticCurvePrivateKey | None:
    if credentials is None:
        return None
    key = serialization.load_pem_private_key(credentials.key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key
