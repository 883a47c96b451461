"""A network in one process that delays, loses, repeats, reorders and cuts, as a seed decides."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

from google.protobuf.message import Message

from pier_node.wire.carrier import HELLO, BadMessage, Chunk, Handler, Method, PeerLost, PeerRefused, Q, R, split
from pier_proto.v1 import peer_pb2
from pier_proto.v1.peer_pb2 import FetchRequest, HelloReply, HelloRequest

END = None


@dataclass
class Weather:
    """What the network does to messages."""

    delay: float = 0.05
    jitter: float = 0.2
    loss: float = 0.0
    repeat: float = 0.0
    cut_stream: float = 0.0
    chunk: float | None = None
    """Seconds that a chunk takes; None: a quarter of `delay`."""

    @classmethod
    def drawn(cls, dice: random.Random) -> Self:
        """From calm to foul."""
        return cls(
            delay=dice.choice([0.01, 0.2, 1.0]),
            jitter=dice.choice([0.0, 0.5, 3.0]),
            loss=dice.choice([0.0, 0.01, 0.03]),
            repeat=dice.choice([0.0, 0.2]),
            cut_stream=dice.choice([0.0, 0.0, 0.01]),
        )


class Network:
    """Joins the carriers of the live nodes."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.carriers: dict[str, SimCarrier] = {}
        self.sides: dict[str, int] = {}
        self.severed: set[frozenset[str]] = set()
        self.cut = asyncio.Event()
        self.hops: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def join(self, node: str) -> SimCarrier:
        self.carriers[node] = SimCarrier(self, node)
        return self.carriers[node]

    def partition(self, *sides: set[str]) -> None:
        """Only nodes of one side hear each other; no argument heals."""
        self.sides = {node: number for number, side in enumerate(sides) for node in side}
        self.cut.set()
        self.cut = asyncio.Event()

    def crash(self, node: str) -> None:
        """Power cut: every task of the node ends where it is."""
        carrier = self.carriers.pop(node, None)
        if carrier:
            carrier.dead = True
            for task in [*carrier.tasks]:
                task.cancel()
            carrier.gone.set()

    def reaches(self, source: str, target: str) -> bool:
        return self.sides.get(source) == self.sides.get(target) and {source, target} not in self.severed

    async def hop(self, source: SimCarrier, target: str) -> SimCarrier | None:
        """One message on its way; None when it never arrives. What has left arrives, whatever becomes of its sender."""
        left = not source.dead
        self.hops[target] += 1
        await asyncio.sleep(self.weather.delay + self.random.random() * self.weather.jitter)
        if not left or not self.reaches(source.node, target) or self.random.random() < self.weather.loss:
            return None
        found = self.carriers.get(target)
        if found is None:
            raise PeerLost(target, "connection refused")
        return found


class SimCarrier:
    """A Carrier over the network above. It dies with its node: a restarted one gets another."""

    def __init__(self, network: Network, node: str) -> None:
        self.node = node
        self.network = network
        self.dead = False
        self.gone = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.handlers: dict[str, Callable[[str, Any], Awaitable[Any]]] = {}
        self.on_push: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]] | None = None
        self.on_pull: Callable[[str, FetchRequest], AsyncIterator[Chunk]] | None = None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run as a part of this node: ends when it crashes."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def introduce(self, node: str, address: str) -> None:
        pass

    def forget(self, node: str) -> None:
        pass

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        return await self.call(address, HELLO, request, timeout)  # a node is reached where its name says

    def bytes_sent(self) -> int:
        return 0

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        self.handlers[method.name] = handler

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        self.on_push = handler

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        self.on_pull = handler

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        try:
            async with asyncio.timeout(timeout):
                return await self._call(peer, method, request)
        except TimeoutError as error:
            raise PeerLost(peer, f"no answer in {timeout:.1f} s") from error

    async def _call(self, peer: str, method: Method[Q, R], request: Q) -> R:
        target = await self.network.hop(self, peer)
        if target is None or method.name not in target.handlers:
            await asyncio.Event().wait()
        assert target
        self.network.calls[method.name] += 1
        self.network.bytes[method.name] += request.ByteSize()
        if self.network.random.random() < self.network.weather.repeat:
            target.spawn(self._ignore(target.handlers[method.name], _copy(request)))
        reply = await self._in(target, target.handlers[method.name], _copy(request))
        back = await target.network.hop(target, self.node)
        if back is not self:
            await asyncio.Event().wait()
        raw = reply.SerializeToString()
        self.network.bytes[method.name] += len(raw)
        return method.reply.FromString(raw)

    async def _ignore(self, handler: Callable[[str, Any], Awaitable[Any]], request: Any) -> None:
        try:
            await handler(self.node, request)
        except (BadMessage, PeerLost):
            return

    async def _in(self, target: SimCarrier, handler: Callable[[str, Any], Awaitable[Any]], request: Any) -> Any:
        """Run a handler at its node; a crash of either end cuts the call."""

        async def handle() -> Any:
            return await handler(self.node, request)

        task = target.spawn(handle())
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise PeerLost(target.node, "connection reset")
        try:
            return task.result()
        except BadMessage as bad:
            raise PeerRefused(target.node, str(bad)) from bad

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        target = await self.network.hop(self, peer)
        if target is None or target.on_push is None:
            raise PeerLost(peer, "unreachable")
        self.network.calls["Exchange"] += 1
        queue: asyncio.Queue[Chunk | PeerLost | None] = asyncio.Queue(2)
        handler = asyncio.create_task(self._in(target, target.on_push, _drain(queue)))
        feeder = self.spawn(self._feed(peer, chunks, queue))
        try:
            await asyncio.wait([handler, feeder], return_when=asyncio.FIRST_COMPLETED)
            if feeder.done() and not feeder.cancelled() and (error := feeder.exception()):
                if not queue.full():
                    queue.put_nowait(PeerLost(self.node, "stream cut"))
                raise error
            await handler
        finally:
            feeder.cancel()
            handler.cancel()
            await asyncio.gather(feeder, handler, return_exceptions=True)

    async def _feed(
        self, peer: str, chunks: AsyncIterator[Chunk], queue: asyncio.Queue[Chunk | PeerLost | None]
    ) -> None:
        async for chunk in chunks:
            if self.network.random.random() < self.network.weather.cut_stream or not self.network.reaches(
                self.node, peer
            ):
                raise PeerLost(peer, "stream cut")
            weather = self.network.weather
            await asyncio.sleep(weather.delay / 4 if weather.chunk is None else weather.chunk)
            await queue.put(_copy(chunk))
        await queue.put(END)

    async def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        target = await self.network.hop(self, peer)
        if target is None or target.on_pull is None:
            raise PeerLost(peer, "unreachable")
        try:
            async for chunk in target.on_pull(self.node, request):
                if target.dead or self.network.random.random() < self.network.weather.cut_stream:
                    raise PeerLost(peer, "stream cut")
                yield _copy(chunk)
        except BadMessage as bad:
            raise PeerRefused(peer, str(bad)) from bad


async def _drain(queue: asyncio.Queue[Chunk | PeerLost | None]) -> AsyncIterator[Chunk]:
    while (item := await queue.get()) is not END:
        if isinstance(item, PeerLost):
            raise item
        yield item


def _copy(message: Any) -> Any:
    """Nothing is shared between nodes: what arrives was parsed from bytes."""
    if isinstance(message, Chunk):
        header, data = split(message.encoded())
        return Chunk.of(peer_pb2.Chunk.FromString(header), data)
    assert isinstance(message, Message)
    return type(message).FromString(message.SerializeToString())
