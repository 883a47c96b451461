"""The data exchange of one attempt: reduce-scatter, then all-gather, in chunks sent directly between the members.

The plan of the attempt, which all members know, says who owns which shard, and what each may send. A member receives
its shard of every member's vector, sums in node-id order whatever the order of arrival, and sends the mean to all. The
mean of a chunk leaves while later chunks still arrive. Threads code and sum up to AT_ONCE chunks of a shard at once. A
slow owner slows its senders through the carrier's flow control: at most WINDOW more chunks of a sender wait in memory.

With a lossy codec every member uses the decoded bytes, the owner included. What is dropped of an update is its sender's
error. What is dropped of a mean, divided by the owner's share of the weight, is its owner's error: added to the next
update, it moves the mean by exactly what is missing. So errors belong to sites, not to shards, which may change every
round.

Of a mean of sparse codes nothing is dropped: the owner passes on the members' codes of a chunk, in node-id order, and
everybody averages them as the owner does, to the same bits (`of_means`; SparseLoCo, arXiv 2508.15706, gathers, too).

`Meter` learns a site's uplink from what the site sent in an exchange. The mean rate over an exchange would not do: all
members end together, held back by the slowest, and would look alike. The busiest second is the site's own: while it
still sends to members other than the slowest, its uplink is the limit.

`send` sends a stream to a member; every failure becomes a Suspicion.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import Buffer, Vector
from pier_node.base.tasks import run_to_end
from pier_node.outer.codec import BadCode, Codec, of_means
from pier_node.outer.mean import (
    EXACT,
    LOSSY,
    Mean,
    Update,
    Weighing,
    capped,
    clip_factors,
    longest_mean,
    relative_weights,
    weighted_mean,
)
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage, Carrier, Chunk, PeerLost, PeerRefused, Stage
from pier_proto.v1.peer_pb2 import Ballot, Share

CHUNK = CHUNK_BYTES // 4
Codes = Mapping[int, Buffer]
"""An encoded mean: the code of each chunk by its first element."""


@dataclass(frozen=True)
class Plan:
    """The plan of one attempt; shares are in node-id order."""

    round: int
    ballot: Ballot
    shares: Sequence[Share]
    norm_limit: float
    """Largest L2 norm that a member's shard may have, whatever the norms of the others."""
    silence: float
    """Seconds without a chunk after which a sender counts as lost."""
    chunk: int = CHUNK
    """Elements in a chunk."""
    weighing: Weighing = field(default_factory=Weighing)
    """Bounds on the weight of the members' tokens."""

    def ranges(self, share: Share) -> list[tuple[int, int]]:
        """First element of each chunk of a shard, and the one after its last."""
        end = share.offset + share.length
        return [(start, min(start + self.chunk, end)) for start in range(share.offset, end, self.chunk)]

    def message(self, stage: Stage, offset: int, data: Buffer) -> Chunk:
        """A chunk of this attempt."""
        return Chunk(round=self.round, ballot=self.ballot, stage=stage, offset=offset, data=data)

    def givers(self) -> list[Share]:
        """Members whose update has a weight."""
        return [share for share in self.shares if share.tokens]

    def weights(self) -> list[np.float32]:
        """Weights of the givers, relative to the largest."""
        tokens, bounds = [share.tokens for share in self.givers()], self.weighing
        return relative_weights(capped(tokens, bounds.whole, bounds.most))

    def over_weight_of(self, node: str) -> float:
        """The weight of all givers together, divided by the weight of one of them."""
        weights = dict(zip((share.node for share in self.givers()), self.weights(), strict=True))
        return float(sum(weights.values())) / float(weights[node])

    def clips(self) -> dict[str, float]:
        """Clipping factor by node, for members whose update is clipped."""
        factors = clip_factors(*self._norms(), self.weighing.whole)
        return {share.node: factor for share, factor in zip(self.shares, factors, strict=True) if factor < 1}

    def longest(self, share: Share, lossy: bool) -> float:
        """Largest L2 norm that a member's update may have on a shard."""
        return min(self.norm_limit, share.norm * (LOSSY if lossy else EXACT))

    def longest_mean(self, lossy: bool) -> float:
        """Largest L2 norm that a shard of the mean may have."""
        longest = min(longest_mean(*self._norms(), self.weighing.whole), self.norm_limit * math.sqrt(len(self.shares)))
        return longest * (LOSSY if lossy else EXACT)

    def _norms(self) -> tuple[list[float], list[int]]:
        return [share.norm for share in self.shares], [share.tokens for share in self.shares]


METER_SECONDS = 1.0
"""Seconds per window: long enough that what the kernel buffers does not count as sent."""


class Meter:
    """Counts bytes sent per window of time; the caller passes the time, in seconds of any clock."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._windows: dict[int, int] = {}
        self._total = 0

    def sent(self, count: int, now: float) -> None:
        """Count bytes that left at this time."""
        window = int((now - self._began) / METER_SECONDS)
        self._windows[window] = self._windows.get(window, 0) + count
        self._total += count
        self._last = now

    def rate(self) -> float:
        """Bytes per second: of the busiest full window, or of the whole time if none is full; 0 if nothing was sent."""
        elapsed = self._last - self._began
        whole = [count for window, count in self._windows.items() if (window + 1) * METER_SECONDS <= elapsed]
        if whole:
            return max(whole) / METER_SECONDS
        return self._total / elapsed if elapsed > 0 else 0.0


async def send(carrier: Carrier, node: str, chunks: AsyncGenerator[Chunk], patience: float = math.inf) -> None:
    """Send the whole stream and close it in any case.

    Args:
        patience: seconds in which the member must take a chunk, and acknowledge the last.

    Raises:
        Suspicion: of NOBODY if the member refused the stream.
    """
    async with aclosing(chunks):
        try:
            async with asyncio.timeout(None) as limit:
                await carrier.push(node, _in_time(chunks, limit, patience))
        except TimeoutError as error:
            raise Suspicion(node, f"took nothing of what we sent for {patience:.0f} s", mute=True) from error
        except PeerRefused as refused:
            raise Suspicion(NOBODY, f"{node} refused what we sent: {refused.reason}", told=[node]) from refused
        except PeerLost as lost:
            raise Suspicion(node, lost.reason) from lost


async def _in_time(chunks: AsyncGenerator[Chunk], limit: asyncio.Timeout, patience: float) -> AsyncGenerator[Chunk]:
    """The chunks; time counts while the member has one to take, not while the next is being made."""
    clock = asyncio.get_running_loop().time
    async for chunk in chunks:
        limit.reschedule(clock() + patience)
        yield chunk
        limit.reschedule(None)
    limit.reschedule(clock() + patience)


WINDOW = 4
AT_ONCE = 4
T = TypeVar("T")


class Part(NamedTuple):
    """A member's chunk: as it travels, and what it says."""

    data: Buffer
    values: Vector


NO_DATA = b""
NO_UPDATE = Update(np.empty(0, np.float32), 0)


class Reduction:
    """One member's part in the exchange of one attempt.

    Args:
        update: its vector is not read if its share has no tokens.
        mean: receives the mean, as long as the update.
        rule: how the members' updates become a mean.

    Attributes:
        clips: clipping factor by node, for members whose update is longer than allowed.
        longest_wait: longest time in seconds that we waited for a member's next chunk.
        complete: set once the mean is complete, when the last chunks for the others may still be on their way.
        codes: the mean as it travels, by the first element of each chunk; of sparse codes, that of our shard only.
    """

    def __init__(
        self,
        carrier: Carrier,
        plan: Plan,
        update: Update,
        mean: Vector,
        codec: Codec,
        faults: Faults = NO_FAULTS,
        rule: Mean = weighted_mean,
    ) -> None:
        self._carrier, self._plan, self._update, self._mean = carrier, plan, update, mean
        self._codec, self._faults, self._rule = codec, faults, rule
        self._slow = codec.lossy or rule is not weighted_mean
        self._weights, self.clips = plan.weights(), plan.clips()
        self.codes: dict[int, Buffer] = {}
        self._mine = next(share for share in plan.shares if share.node == carrier.node)
        self._whole = plan.over_weight_of(carrier.node) if self._mine.tokens else 0.0
        self._others = [share for share in plan.shares if share.node != carrier.node]
        self._senders = {share.node: asyncio.Queue[Part](WINDOW) for share in self._others if share.tokens}
        self._heard = {share.node: asyncio.Event() for share in self._others}
        self._opened: set[tuple[str, int]] = set()
        self._complete: set[str] = set()
        self._broken: asyncio.Future[Suspicion] = asyncio.get_running_loop().create_future()
        self._over, self.complete = False, asyncio.Event()
        self._sent = asyncio.Semaphore(0)
        self.longest_wait = 0.0
        self.meter = Meter(asyncio.get_running_loop().time())
        self._reduced = {start: asyncio.Event() for start, _ in plan.ranges(self._mine)}

    async def run(self) -> None:
        """Exchange chunks with all members; return once they have acknowledged everything. Raises Suspicion."""
        worst: Suspicion | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch())
                await self._exchange(tasks)
                watch.cancel()
                self._let_go()
                self.complete.set()
        except* Suspicion as group:
            worst = _worst(group)
        finally:
            self._let_go()
        if worst:  # before Python 3.11.4, an exception raised inside `except*` is wrapped in a group
            raise worst

    async def _exchange(self, acknowledged: asyncio.TaskGroup) -> None:
        """Return once the mean is complete and the last chunks are on their way to the others."""
        for share in self._others:
            # A member may have to wait for a third one before it takes more, so it gets twice the silence.
            for chunks in (self._scatter_to(share), self._gather_to()):
                acknowledged.create_task(send(self._carrier, share.node, chunks, 2 * self._plan.silence))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reduce())
            for share in self._others:
                tasks.create_task(self._await_shard(share))
        for _ in range(2 * len(self._others)):
            await self._sent.acquire()

    def _let_go(self) -> None:
        # What is under way may refer to this object until it is collected, but the vectors are needed elsewhere.
        self._over, self._update, self._mean = True, NO_UPDATE, NO_UPDATE.vector
        for queue in self._senders.values():  # a stream that waits for room would wait for ever
            while not queue.empty():
                queue.get_nowait()

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive a member's stream of this attempt. Raises BadMessage: the sender is told, and suspected."""
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

    async def _scatter_to(self, owner: Share) -> AsyncGenerator[Chunk]:
        """Our vector on the owner's shard; an empty stream if our update has no weight or the owner owns nothing."""
        yield self._plan.message(Chunk.STAGE_SCATTER, owner.offset, NO_DATA)
        if self._mine.tokens:
            for start, end in self._plan.ranges(owner):
                data = (await self._work(partial(self._coded, slice(start, end)))).data
                yield self._plan.message(Chunk.STAGE_SCATTER, start, data)
                self.meter.sent(len(data), asyncio.get_running_loop().time())
        self._sent.release()

    async def _gather_to(self) -> AsyncGenerator[Chunk]:
        """The mean of our shard, chunk by chunk as each becomes ready."""
        yield self._plan.message(Chunk.STAGE_GATHER, self._mine.offset, NO_DATA)
        for start, end in self._plan.ranges(self._mine):
            await self._reduced[start].wait()
            data = self.codes[start] if self._codec.lossy else self._codec.encode(self._mean[start:end])
            yield self._plan.message(Chunk.STAGE_GATHER, start, data)
            self.meter.sent(len(data), asyncio.get_running_loop().time())
        self._sent.release()

    async def _reduce(self) -> None:
        """Take the parts of each chunk of our shard in order, and reduce up to AT_ONCE chunks at a time."""
        squares = dict.fromkeys(self._senders, 0.0)
        room = asyncio.Semaphore(AT_ONCE if self._slow else 1)  # without threads, others get a turn after each chunk
        others = [share for share in self._plan.givers() if share.node != self._carrier.node]
        async with asyncio.TaskGroup() as tasks:
            for start, end in self._plan.ranges(self._mine):
                await room.acquire()
                parts = {share.node: await self._next_part(share, squares) for share in others}
                tasks.create_task(self._reduce_chunk(slice(start, end), parts, room))

    async def _reduce_chunk(self, part: slice, parts: Mapping[str, Part], room: asyncio.Semaphore) -> None:
        await self._work(partial(self._average, part, parts))
        await self._faults.reach(self._plan.round, "exchanging")
        self._reduced[part.start].set()
        room.release()

    def _own(self, part: slice) -> Part:
        """Our own part as the other members would decode it."""
        return self._coded(part) if self._codec.lossy else Part(NO_DATA, self._update.sent(part))

    def _part(self, data: Buffer, length: int) -> Part:
        return Part(data, self._codec.decode(data, length))

    def _coded(self, part: slice) -> Part:
        """A part of our vector as it travels and as all decode it; keeps its error."""
        values = self._update.sent(part)
        coded = self._part(self._codec.encode(values), len(values))
        if (error := self._update.error) is not None:
            error[part] = values - coded.values
        return coded

    def _average(self, part: slice, received: Mapping[str, Part]) -> None:
        """Sum a chunk of our shard in node-id order, leaving out members without tokens."""
        mean, nodes = self._mean[part], [share.node for share in self._plan.givers()]
        parts = {node: received[node] if node in received else self._own(part) for node in nodes}
        self._mean_of({node: it.values for node, it in parts.items()}, mean)
        if not self._codec.lossy:
            return
        means = of_means(self._codec, len(parts), len(mean))
        if means is None:
            self.codes[part.start] = b"".join(it.data for it in parts.values())
            return
        data = self.codes[part.start] = means.encode(mean)
        decoded = means.decode(data, len(mean))
        if (error := self._update.error) is not None and self._mine.tokens:
            error[part] += np.float32(self._whole) * (mean - decoded)
        mean[:] = decoded

    def _mean_of(self, parts: Mapping[str, Vector], out: Vector) -> None:
        clips = self.clips
        clipped = [it * np.float32(clips[node]) if node in clips else it for node, it in parts.items()]
        self._rule(clipped, self._weights, out)

    def _mean_part(self, data: Buffer, length: int) -> Part:
        """A chunk of a mean. Raises BadCode."""
        givers = [share.node for share in self._plan.givers()]
        means = of_means(self._codec, len(givers), length)
        if means is not None:
            return Part(data, means.decode(data, length))
        size = self._codec.size(length)
        if len(data) != size * len(givers):
            raise BadCode(f"{len(data)} bytes for {len(givers)} codes of {length} values")
        codes = (data[start : start + size] for start in range(0, len(data), size))
        mean = np.empty(length, np.float32)
        self._mean_of({node: self._codec.decode(code, length) for node, code in zip(givers, codes, strict=True)}, mean)
        return Part(data, mean)

    async def _work(self, work: Callable[[], T]) -> T:
        """Run codecs and sorting in a thread, as they take long enough for it; copies and sums do not.

        It is finished even if the attempt ends: the memory that it writes to is the next attempt's.
        """
        return await run_to_end(asyncio.to_thread(work)) if self._slow else work()

    async def _next_part(self, share: Share, squares: dict[str, float]) -> Part:
        node, loop = share.node, asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._plan.silence):
                part = await self._senders[node].get()
            self.longest_wait = max(self.longest_wait, loop.time() - began)
        except TimeoutError as error:
            raise Suspicion(node, f"sent nothing for {self._plan.silence:.0f} s", mute=True) from error
        squares[node] += float(np.dot(part.values, part.values))
        limit = self._plan.longest(share, self._codec.lossy)
        if not squares[node] <= limit**2:
            raise Suspicion(node, f"its update is not finite, or its norm is above {limit:.3g}")
        return part

    async def _await_shard(self, share: Share) -> None:
        """Wait for the owner's means. It may have to wait for a third member itself, so it gets twice the silence."""
        heard = self._heard[share.node]
        while share.node not in self._complete:
            heard.clear()
            try:
                async with asyncio.timeout(2 * self._plan.silence):
                    await heard.wait()
            except TimeoutError as error:
                raise Suspicion(share.node, f"sent no mean for {2 * self._plan.silence:.0f} s", mute=True) from error

    async def _watch(self) -> None:
        """End the attempt when an incoming stream is broken or refused."""
        raise await self._broken

    async def _take_scatter(self, share: Share, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        ranges = self._plan.ranges(self._mine) if share.tokens else []
        async for part in self._expect(ranges, first, rest, self._part):
            await self._senders[share.node].put(part)

    async def _take_gather(self, share: Share, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        position, squares, limit = share.offset, 0.0, self._plan.longest_mean(self._codec.lossy)
        async for data, part in self._expect(self._plan.ranges(share), first, rest, self._mean_part):
            squares += float(np.dot(part, part))
            if not squares <= limit**2:
                raise BadMessage(f"a mean that is not finite, or of a norm above {limit:.3g}: no mean of this round is")
            self._mean[position : position + len(part)] = part
            if self._codec.lossy and not self._codec.sparse:
                self.codes[position] = data
            position += len(part)
            await self._faults.reach(self._plan.round, "exchanging")  # a member may own no shard
            self._heard[share.node].set()
        self._complete.add(share.node)
        self._heard[share.node].set()

    async def _expect(
        self,
        ranges: Sequence[tuple[int, int]],
        first: Chunk,
        rest: AsyncIterator[Chunk],
        decode: Callable[[Buffer, int], T],
    ) -> AsyncIterator[T]:
        """Yield exactly the chunks of these ranges in order; refuse any repeated, missing or differently sized one."""
        if first.data:
            raise BadMessage("a stream opens with an empty chunk that names it")
        awaited = iter(ranges)
        async for chunk in rest:
            start, end = next(awaited, (0, 0))
            if chunk.offset != start or start == end:
                raise BadMessage(f"chunk at {chunk.offset} of {len(chunk.data)} bytes, expected {start}..{end}")
            try:
                part = await self._work(partial(decode, chunk.data, end - start))
            except BadCode as bad:
                raise BadMessage(f"chunk at {start}: {bad}") from bad
            if self._over:  # the next attempt may be using `mean`
                raise BadMessage("that attempt is over")
            yield part
            await asyncio.sleep(0)  # nothing above yields while chunks are here already
        if next(awaited, None) is not None:
            raise BadMessage("the stream ended early")


def _worst(group: BaseExceptionGroup[Suspicion]) -> Suspicion:
    """Of several suspicions, one that names a member: a refusal is often only the echo of a failure elsewhere."""
    found: list[Suspicion] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        elif isinstance(error, Suspicion):
            found.append(error)
    return max(found, key=lambda suspicion: suspicion.node != NOBODY)
