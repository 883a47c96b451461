"""The data of one attempt: reduce-scatter, then all-gather, straight between the members in chunks.

Each member owns a shard. It takes that shard of everybody's vector, sums it in node-id order whatever the order of
arrival, and sends the mean to all. The mean of a chunk leaves while later chunks still come in, and a slow owner holds
its senders back through the carrier's flow control: at most `WINDOW` chunks of a sender wait in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from pier.v1.peer_pb2 import Ballot, Chunk, Share
from pier_node.faults import NO_FAULTS, Faults
from pier_node.outer.mean import relative_weights, weighted_mean
from pier_node.outer.meter import Meter
from pier_node.shared import Vector
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage, Carrier, PeerLost, PeerRefused

CHUNK = CHUNK_BYTES // 4
WINDOW = 4
NO_DATA = b""
NOBODY = ""


class Suspicion(Exception):
    """An attempt cannot go on because of a member: lost, or refused for what it sent; `node` may be NOBODY."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}" if node else reason)
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    """What all members of an attempt know: its name, who owns what, and the bound on what anyone may send."""

    round: int
    ballot: Ballot
    shares: Sequence[Share]
    norm_limit: float
    """Largest L2 norm that a member's shard may have."""
    silence: float
    """Seconds without a chunk after which a sender counts as lost."""
    chunk: int = CHUNK
    """Elements in a chunk."""


class Reduction:
    """One member's part in one attempt.

    Args:
        vector: its contribution, shape [parameters]; not read where its share has no tokens.
        mean: takes the token-weighted mean, shape [parameters]; complete once `run` returns.

    Attributes:
        longest_wait: seconds that a member's next chunk let us wait at most.
        meter: what we sent, and when.
    """

    def __init__(self, carrier: Carrier, plan: Plan, vector: Vector, mean: Vector, faults: Faults = NO_FAULTS) -> None:
        self._carrier = carrier
        self._faults = faults
        self._plan = plan
        self._vector = vector
        self._mean = mean
        self._mine = next(share for share in plan.shares if share.node == carrier.node)
        self._others = [share for share in plan.shares if share.node != carrier.node]
        self._senders = {share.node: asyncio.Queue[bytes](WINDOW) for share in self._others if share.tokens}
        self._heard = {share.node: asyncio.Event() for share in self._others}
        self._opened: set[tuple[str, int]] = set()
        self._complete: set[str] = set()
        self._broken: asyncio.Future[Suspicion] = asyncio.get_running_loop().create_future()
        self._over = False
        self.longest_wait = 0.0
        self.meter = Meter(asyncio.get_running_loop().time())
        self._reduced = 0
        self._progress = asyncio.Condition()

    async def run(self) -> None:
        """Exchange with all members. Raises Suspicion."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch())
                await self._exchange()
                watch.cancel()
        except* Suspicion as group:
            raise _worst(group) from group
        finally:
            self._over = True

    async def _exchange(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reduce())
            for share in self._others:
                tasks.create_task(self._push(share.node, self._scatter_to(share)))
                tasks.create_task(self._push(share.node, self._gather_to()))
                tasks.create_task(self._await_shard(share))

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Take a stream of this attempt from a member. Raises BadMessage: the sender is told, and suspected."""
        share = next((share for share in self._others if share.node == sender), None)
        if share is None:
            raise BadMessage(f"{sender} is not a member of this attempt")
        if (sender, first.stage) in self._opened:
            raise BadMessage("a second stream of the same kind")
        self._opened.add((sender, first.stage))
        take = self._take_scatter if first.stage == Chunk.STAGE_SCATTER else self._take_gather
        try:
            await take(share, first, rest)
        except (BadMessage, PeerLost) as error:
            if not self._broken.done():
                reason = error.reason if isinstance(error, PeerLost) else str(error)
                self._broken.set_result(Suspicion(sender, reason))
            raise

    async def _push(self, node: str, chunks: AsyncIterator[Chunk]) -> None:
        async with aclosing(chunks):  # type: ignore[type-var]
            try:
                await self._carrier.push(node, chunks)
            except PeerRefused as refused:
                raise Suspicion(NOBODY, f"{node} refused what we sent: {refused.reason}") from refused
            except PeerLost as lost:
                raise Suspicion(node, lost.reason) from lost

    async def _scatter_to(self, owner: Share) -> AsyncIterator[Chunk]:
        """Our vector on the owner's shard; an empty stream if it has no weight or the owner owns nothing."""
        yield self._chunk(Chunk.STAGE_SCATTER, owner.offset, NO_DATA)
        if self._mine.tokens:
            for start, end in self._ranges(owner):
                yield self._chunk(Chunk.STAGE_SCATTER, start, self._vector[start:end].tobytes())
                self.meter.sent(4 * (end - start), asyncio.get_running_loop().time())

    async def _gather_to(self) -> AsyncIterator[Chunk]:
        """The mean of our shard, chunk by chunk as it becomes ready."""
        yield self._chunk(Chunk.STAGE_GATHER, self._mine.offset, NO_DATA)
        for start, end in self._ranges(self._mine):
            async with self._progress:
                while self._reduced < end:
                    await self._progress.wait()
            yield self._chunk(Chunk.STAGE_GATHER, start, self._mean[start:end].tobytes())
            self.meter.sent(4 * (end - start), asyncio.get_running_loop().time())

    async def _reduce(self) -> None:
        """Sum our shard in node-id order; members without tokens are left out."""
        weights = relative_weights([share.tokens for share in self._plan.shares])
        givers = [(share.node, weight) for share, weight in zip(self._plan.shares, weights, strict=True) if weight]
        squares = dict.fromkeys(self._senders, 0.0)
        for start, end in self._ranges(self._mine):
            parts = [
                self._vector[start:end] if node == self._carrier.node else await self._next_part(node, squares)
                for node, _ in givers
            ]
            weighted_mean(parts, [weight for _, weight in givers], out=self._mean[start:end])
            await self._faults.reach(self._plan.round, "exchanging")
            async with self._progress:
                self._reduced = end
                self._progress.notify_all()

    async def _next_part(self, node: str, squares: dict[str, float]) -> Vector:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            data = await asyncio.wait_for(self._senders[node].get(), self._plan.silence)
            self.longest_wait = max(self.longest_wait, loop.time() - began)
        except TimeoutError as error:
            raise Suspicion(node, f"sent nothing for {self._plan.silence:.0f} s") from error
        part = np.frombuffer(data, dtype="<f4")
        squares[node] += float(np.dot(part, part))
        if not squares[node] <= self._plan.norm_limit**2:
            raise Suspicion(node, f"its update is not finite, or its norm is above {self._plan.norm_limit:.3g}")
        return part

    async def _await_shard(self, share: Share) -> None:
        """Wait for the owner's means. It may itself have to wait for a third member: allow it twice the silence."""
        heard = self._heard[share.node]
        while share.node not in self._complete:
            heard.clear()
            try:
                await asyncio.wait_for(heard.wait(), 2 * self._plan.silence)
            except TimeoutError as error:
                raise Suspicion(share.node, f"sent no mean for {2 * self._plan.silence:.0f} s") from error

    async def _watch(self) -> None:
        """End the attempt when a stream that comes in is broken or refused."""
        raise await self._broken

    async def _take_scatter(self, share: Share, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        ranges = self._ranges(self._mine) if share.tokens else []
        async for data in self._expect(ranges, first, rest):
            await self._senders[share.node].put(data)

    async def _take_gather(self, share: Share, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        position = share.offset
        async for data in self._expect(self._ranges(share), first, rest):
            part = np.frombuffer(data, dtype="<f4")
            self._mean[position : position + len(part)] = part
            position += len(part)
            await self._faults.reach(self._plan.round, "exchanging")  # a member may own no shard
            self._heard[share.node].set()
        self._complete.add(share.node)
        self._heard[share.node].set()

    async def _expect(
        self, ranges: Sequence[tuple[int, int]], first: Chunk, rest: AsyncIterator[Chunk]
    ) -> AsyncIterator[bytes]:
        """Exactly the chunks of these ranges, in order: anything repeated, missing or of another size is refused."""
        if first.data:
            raise BadMessage("a stream opens with an empty chunk that names it")
        awaited = iter(ranges)
        async for chunk in rest:
            start, end = next(awaited, (0, 0))
            if self._over:  # `mean` may be in use by the next attempt
                raise BadMessage("that attempt is over")
            if (chunk.offset, len(chunk.data)) != (start, 4 * (end - start)) or start == end:
                raise BadMessage(f"chunk at {chunk.offset} of {len(chunk.data)} bytes, expected {start}..{end}")
            yield chunk.data
        if next(awaited, None) is not None:
            raise BadMessage("the stream ended early")

    def _ranges(self, share: Share) -> list[tuple[int, int]]:
        end = share.offset + share.length
        return [(start, min(start + self._plan.chunk, end)) for start in range(share.offset, end, self._plan.chunk)]

    def _chunk(self, stage: Chunk.Stage.ValueType, offset: int, data: bytes) -> Chunk:
        return Chunk(round=self._plan.round, ballot=self._plan.ballot, stage=stage, offset=offset, data=data)


def _worst(group: BaseExceptionGroup[Suspicion]) -> Suspicion:
    """Of several suspicions, one that names a member: a refusal is often only the echo of what went wrong elsewhere."""
    found: list[Suspicion] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        elif isinstance(error, Suspicion):
            found.append(error)
    return max(found, key=lambda suspicion: suspicion.node != NOBODY)
