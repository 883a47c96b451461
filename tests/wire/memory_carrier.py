"""Carriers that meet in one process; a test says what goes wrong with what a node streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from pier_node.wire.bounds import parse_chunk
from pier_node.wire.carrier import BadMessage, Chunk, Handler, Method, PeerLost, PeerRefused, Q, R
from pier_proto.v1.peer_pb2 import FetchRequest, HelloReply, HelloRequest

Spoil = Callable[[Chunk], Awaitable[Chunk]]
"""What becomes of a chunk on its way: another one, PeerLost, or nothing for ever."""


class MemoryNet:
    """The nodes that reach each other, and what was fetched: (server, request) of each pull."""

    def __init__(self) -> None:
        self.nodes: dict[str, MemoryCarrier] = {}
        self.spoils: dict[str, Spoil] = {}
        self.pulled: list[tuple[str, FetchRequest]] = []

    def join(self, node: str) -> MemoryCarrier:
        self.nodes[node] = MemoryCarrier(node, self)
        return self.nodes[node]

    def reach(self, peer: str) -> MemoryCarrier:
        if peer not in self.nodes:
            raise PeerLost(peer, "unreachable")
        return self.nodes[peer]


class MemoryCarrier:
    """A Carrier without a wire: messages are copied, handlers run in the caller's task."""

    def __init__(self, node: str, net: MemoryNet) -> None:
        self.node = node
        self._net = net
        self._handlers: dict[str, Any] = {}
        self._pull: Callable[[str, FetchRequest], AsyncIterator[Chunk]] | None = None

    def introduce(self, node: str, address: str) -> None:
        raise AssertionError("not used in state transfer")

    def forget(self, node: str) -> None:
        raise AssertionError("not used in state transfer")

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        raise AssertionError("not used in state transfer")

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        handler = self._net.reach(peer)._handlers[method.name]
        try:
            reply = await handler(self.node, method.request.FromString(request.SerializeToString()))
        except BadMessage as refusal:
            raise PeerRefused(peer, str(refusal)) from refusal
        return method.reply.FromString(reply.SerializeToString())

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        raise AssertionError("not used in state transfer")

    async def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk, None]:
        serve = self._net.reach(peer)._pull
        assert serve
        self._net.pulled.append((peer, request))
        try:
            async for sent in serve(self.node, request):
                chunk = parse_chunk(sent.encoded())
                await asyncio.sleep(0)  # lets the other streams move on
                yield await self._net.spoils[peer](chunk) if peer in self._net.spoils else chunk
        except BadMessage as refusal:
            raise PeerRefused(peer, str(refusal)) from refusal

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        self._handlers[method.name] = handler

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        raise AssertionError("not used in state transfer")

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        self._pull = handler

    def bytes_sent(self) -> int:
        return 0
