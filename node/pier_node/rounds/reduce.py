"""The data exchange of one attempt: reduce-scatter, then all-gather, in chunks sent directly between the members.

The plan of the attempt, which all members know, says who owns which shard, what each may send, and whether all send to
all or each to its row and its column (exchange_plan.py). A member receives its shard of every member's vector, sums in
node-id order whatever the order of arrival, and sends the mean to all. The mean of a chunk leaves while later chunks
still arrive. Threads code and sum up to AT_ONCE chunks of a shard at once. A slow owner slows its senders through the
carrier's flow control: at most WINDOW more chunks of a sender wait in memory.

With a lossy codec every member uses the decoded bytes, the owner included. What is dropped of an update is its sender's
error. What is dropped of a mean, divided by the owner's share of the weight, is its owner's error: added to the next
update, it moves the mean by exactly what is missing. So errors belong to sites, not to shards, which may change every
round.

In a column, what travels is the means of rows. What is dropped there is an error of the site that made the row's mean.

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
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import Buffer, Vector
from pier_node.base.tasks import run_to_end
from pier_node.outer.codec import BadCode, Codec, of_means
from pier_node.outer.mean import Mean, Update, weighted_mean
from pier_node.rounds.exchange_plan import Level, Plan, Range
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.carrier import BadMessage, Carrier, Chunk, PeerLost, PeerRefused

Codes = Mapping[int, Buffer]
"""An encoded mean: the code of each chunk by its first element."""


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
Marks = defaultdict[int, asyncio.Event]
"""Set once a chunk is there, by its first element."""


class Reduction:
    """One member's part in the exchange of one attempt.

    Args:
        update: its vector is not read if its share has no tokens.
        mean: receives the mean, as long as the update.
        rule: how the members' updates become a mean.

    Attributes:
        clips: clipping factor by node, for members whose update is longer than allowed.
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
        self.carrier, self.plan, self.mean = carrier, plan, mean
        self.codec, self.faults, self.rule = codec, faults, rule
        self.clips, self.codes, self.here = plan.clips, dict[int, Buffer](), Marks(asyncio.Event)
        self.complete, self.meter = asyncio.Event(), Meter(asyncio.get_running_loop().time())
        self._slow = codec.lossy or rule is not weighted_mean
        levels = None
        if rule is weighted_mean and not codec.sparse:
            levels = plan.two_levels(carrier.node, codec.lossy)
        row, column = levels or (plan.one_level(codec.lossy), None)
        self._column = LevelExchange(self, column, _room_for_row(update), Marks(asyncio.Event)) if column else None
        self._first = LevelExchange(self, row, update, above=self._column)

    @property
    def longest_wait(self) -> float:
        """Longest time in seconds that we waited for a member's next chunk."""
        return self._first.longest_wait

    async def run(self) -> None:
        """Exchange chunks with the others; return once they have acknowledged everything. Raises Suspicion."""
        worst: Suspicion | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                levels = [level for level in (self._first, self._column) if level]
                watches = [tasks.create_task(level.watch()) for level in levels]
                async with asyncio.TaskGroup() as exchanges:
                    for level in levels:
                        exchanges.create_task(level.exchange(tasks))
                await self.work(self._first.keep_error_of_row)
                for watch in watches:
                    watch.cancel()
                self._let_go()
                self.complete.set()
        except* Suspicion as group:
            worst = _worst(group)
        finally:
            self._let_go()
        if worst:  # before Python 3.11.4, an exception raised inside `except*` is wrapped in a group
            raise worst

    def _let_go(self) -> None:
        # What is under way may refer to this object until it is collected, but the vectors are needed elsewhere.
        self.mean = NO_UPDATE.vector
        self._first.let_go()
        if self._column:
            self._column.let_go()

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive a member's stream of this attempt. Raises BadMessage: the sender is told, and suspected."""
        level = self._column if self._column and sender in self._column.others else self._first
        await level.take(sender, first, rest)

    async def work(self, work: Callable[[], T]) -> T:
        """Run codecs and sorting in a thread, as they take long enough for it; copies and sums do not.

        It is finished even if the attempt ends: the memory that it writes to is the next attempt's.
        """
        return await run_to_end(asyncio.to_thread(work)) if self._slow else work()

    @property
    def at_once(self) -> int:
        """How many chunks are reduced at a time. Without threads, others get a turn after each chunk."""
        return AT_ONCE if self._slow else 1


def _room_for_row(update: Update) -> Update:
    """Room for the mean of a row. Memory is taken for the column's shards only: no other element is ever touched."""
    count = len(update.vector)
    return Update(np.empty(count, np.float32), 1, None if update.error is None else np.zeros(count, np.float32))


class LevelExchange:
    """What a member exchanges with all members, or with its row or its column of them.

    Args:
        update: what this member gives.
        given: marks the chunks of `update` that are there; None: all are.
        above: the exchange of the column, which makes a mean of all of the row's mean; None: this one's is that of all.

    Attributes:
        longest_wait: longest time in seconds that we waited for a member's next chunk.
    """

    def __init__(
        self,
        whole: Reduction,
        level: Level,
        update: Update,
        given: Marks | None = None,
        above: LevelExchange | None = None,
    ) -> None:
        self._whole, self._level, self.update, self.given, self._above = whole, level, update, given, above
        self._node, self._codec = whole.carrier.node, whole.codec
        self._gives = self._node in level.weights
        self.others = [node for node in level.nodes if node != self._node]
        self._senders = {node: asyncio.Queue[Part](WINDOW) for node in self.others if node in level.weights}
        self._heard = {node: asyncio.Event() for node in self.others}
        self._took_part = {node: asyncio.Event() for node in self.others}
        self._opened: set[tuple[str, int]] = set()
        self._complete: set[str] = set()
        self._broken: asyncio.Future[Suspicion] = asyncio.get_running_loop().create_future()
        self._over, self._sent, self.longest_wait = False, asyncio.Semaphore(0), 0.0

    async def exchange(self, acknowledged: asyncio.TaskGroup) -> None:
        """Return once all means are here and the last chunks are on their way to the others. Raises Suspicion."""
        for node in self.others:
            # A member may have to wait for a third one before it takes more, so it gets twice the silence.
            for chunks in (self._scatter_to(node), self._gather_to()):
                acknowledged.create_task(send(self._whole.carrier, node, chunks, 2 * self._level.silence))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reduce())
            for node in self.others:
                tasks.create_task(self._await_means(node))
        for _ in range(2 * len(self.others)):
            await self._sent.acquire()

    async def watch(self) -> None:
        """End the attempt when an incoming stream is broken or refused."""
        raise await self._broken

    def let_go(self) -> None:
        """Refer to no vector any more."""
        self._over, self.update = True, NO_UPDATE
        for queue in self._senders.values():  # a stream that waits for room would wait for ever
            while not queue.empty():
                queue.get_nowait()

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive a member's stream. Raises BadMessage: the sender is told, and suspected."""
        if sender not in self._heard:
            raise BadMessage(f"{sender} is not a member of this attempt")
        if (sender, first.stage) in self._opened:
            raise BadMessage("a second stream of the same kind")
        self._opened.add((sender, first.stage))
        take = self._take_scatter if first.stage == Chunk.STAGE_SCATTER else self._take_gather
        try:
            await take(sender, first, rest)
        except (BadMessage, PeerLost) as error:
            if not self._broken.done():
                reason = error.reason if isinstance(error, PeerLost) else str(error)
                self._broken.set_result(Suspicion(sender, reason))
            raise

    # --- what we send --------------------------------------------------------------------------

    async def _scatter_to(self, owner: str) -> AsyncGenerator[Chunk]:
        """Our vector on the owner's chunks; an empty stream if our update has no weight or the owner owns nothing."""
        chunks, message = self._level.chunks[owner], self._whole.plan.message
        yield message(Chunk.STAGE_SCATTER, _first(chunks), NO_DATA)
        for start, end in chunks:
            await self._until_given(start)
            if self._gives:
                data = (await self._whole.work(partial(self._coded, slice(start, end)))).data
                yield message(Chunk.STAGE_SCATTER, start, data)
                self._whole.meter.sent(len(data), asyncio.get_running_loop().time())
        self._sent.release()

    async def _until_given(self, start: int) -> None:
        """Return once this chunk of our vector is there."""
        if self.given is not None:
            await self.given[start].wait()

    async def _gather_to(self) -> AsyncGenerator[Chunk]:
        """The means of our chunks, as each becomes ready."""
        whole, chunks = self._whole, self._level.chunks[self._node]
        yield whole.plan.message(Chunk.STAGE_GATHER, _first(chunks), NO_DATA)
        for start, end in chunks:
            await whole.here[start].wait()
            data = whole.codes[start] if self._codec.lossy else self._codec.encode(whole.mean[start:end])
            yield whole.plan.message(Chunk.STAGE_GATHER, start, data)
            whole.meter.sent(len(data), asyncio.get_running_loop().time())
        self._sent.release()

    # --- what we average -----------------------------------------------------------------------

    async def _reduce(self) -> None:
        """Take the parts of each of our chunks in order, and reduce some chunks at a time."""
        for node in self.others:
            if node not in self._senders:
                await self._said(self._took_part[node].wait(), node)
        squares = dict.fromkeys(self._senders, 0.0)
        room = asyncio.Semaphore(self._whole.at_once)
        async with asyncio.TaskGroup() as tasks:
            for start, end in self._level.chunks[self._node]:
                await room.acquire()
                await self._until_given(start)
                parts = {node: await self._next_part(node, squares) for node in self._senders}
                tasks.create_task(self._reduce_chunk(slice(start, end), parts, room))

    async def _reduce_chunk(self, part: slice, parts: Mapping[str, Part], room: asyncio.Semaphore) -> None:
        await self._whole.work(partial(self._average, part, parts))
        await self._whole.faults.reach(self._whole.plan.round, "exchanging")
        marks = self._above.given if self._above else self._whole.here
        assert marks is not None
        marks[part.start].set()
        room.release()

    def _own(self, part: slice) -> Part:
        """Our own part as the other members would decode it."""
        return self._coded(part) if self._codec.lossy else Part(NO_DATA, self.update.sent(part))

    def _part(self, data: Buffer, length: int) -> Part:
        return Part(data, self._codec.decode(data, length))

    def _coded(self, part: slice) -> Part:
        """A part of our vector as it travels and as all decode it; keeps its error."""
        values = self.update.sent(part)
        coded = self._part(self._codec.encode(values), len(values))
        if (error := self.update.error) is not None:
            error[part] = values - coded.values
        return coded

    def _average(self, part: slice, received: Mapping[str, Part]) -> None:
        """Sum one of our chunks in node-id order, leaving out members without weight."""
        mean = (self._above.update.vector if self._above else self._whole.mean)[part]
        parts = {node: received[node] if node in received else self._own(part) for node in self._level.weights}
        self._mean_of({node: it.values for node, it in parts.items()}, mean)
        if self._above or not self._codec.lossy:
            return
        means = of_means(self._codec, len(parts), len(mean))
        if means is None:
            self._whole.codes[part.start] = b"".join(it.data for it in parts.values())
            return
        data = self._whole.codes[part.start] = means.encode(mean)
        decoded = means.decode(data, len(mean))
        if (error := self.update.error) is not None and self._gives:
            error[part] += np.float32(self._level.over_weight_of(self._node)) * (mean - decoded)
        mean[:] = decoded

    def keep_error_of_row(self) -> None:
        """Add to our error what the column has dropped of our row's mean, and of the mean of all."""
        error, dropped = self.update.error, self._above.update.error if self._above else None
        if error is None or dropped is None or not self._gives:
            return
        over_weight = np.float32(self._level.over_weight_of(self._node))
        for start, end in self._level.chunks[self._node]:
            error[start:end] += over_weight * dropped[start:end]

    def _mean_of(self, parts: Mapping[str, Vector], out: Vector) -> None:
        clips = self._level.clips
        clipped = [it * np.float32(clips[node]) if node in clips else it for node, it in parts.items()]
        self._whole.rule(clipped, [*self._level.weights.values()], out)

    def _mean_part(self, data: Buffer, length: int) -> Part:
        """A chunk of a mean. Raises BadCode."""
        givers = [*self._level.weights]
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

    # --- what we receive -----------------------------------------------------------------------

    async def _said(self, awaited: Awaitable[T], node: str) -> T:
        """What a member sends. Raises Suspicion if it says nothing for too long."""
        silence = self._level.silence
        try:
            async with asyncio.timeout(silence):
                return await awaited
        except TimeoutError as error:
            raise Suspicion(node, f"sent nothing for {silence:.0f} s", mute=True) from error

    async def _next_part(self, node: str, squares: dict[str, float]) -> Part:
        clock = asyncio.get_running_loop().time
        began = clock()
        part = await self._said(self._senders[node].get(), node)
        self.longest_wait = max(self.longest_wait, clock() - began)
        squares[node] += float(np.dot(part.values, part.values))
        limit = self._level.longest[node]
        if not squares[node] <= limit**2:
            raise Suspicion(node, f"its update is not finite, or its norm is above {limit:.3g}")
        return part

    async def _await_means(self, node: str) -> None:
        """Wait for the means that a member owns."""
        heard, silence = self._heard[node], self._level.silence_of_means
        while node not in self._complete:
            heard.clear()
            try:
                async with asyncio.timeout(silence):
                    await heard.wait()
            except TimeoutError as error:
                raise Suspicion(node, f"sent no mean for {silence:.0f} s", mute=True) from error

    async def _take_scatter(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        chunks = self._level.chunks[self._node] if sender in self._senders else []
        async for _, part in self._expect(chunks, first, rest, self._part):
            await self._senders[sender].put(part)
        self._took_part[sender].set()

    async def _take_gather(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        whole, squares, limit = self._whole, 0.0, self._level.longest_mean
        async for start, (data, part) in self._expect(self._level.chunks[sender], first, rest, self._mean_part):
            squares += float(np.dot(part, part))
            if not squares <= limit**2:
                raise BadMessage(f"a mean that is not finite, or of a norm above {limit:.3g}: no mean of this round is")
            whole.mean[start : start + len(part)] = part
            if self._codec.lossy and not self._codec.sparse:
                whole.codes[start] = data
            whole.here[start].set()
            await whole.faults.reach(whole.plan.round, "exchanging")  # a member may own no shard
            self._heard[sender].set()
        self._complete.add(sender)
        self._heard[sender].set()

    async def _expect(
        self,
        ranges: Sequence[Range],
        first: Chunk,
        rest: AsyncIterator[Chunk],
        decode: Callable[[Buffer, int], T],
    ) -> AsyncIterator[tuple[int, T]]:
        """Yield exactly the chunks of these ranges in order; refuse any repeated, missing or differently sized one."""
        if first.data:
            raise BadMessage("a stream opens with an empty chunk that names it")
        awaited = iter(ranges)
        async for chunk in rest:
            start, end = next(awaited, (0, 0))
            if chunk.offset != start or start == end:
                raise BadMessage(f"chunk at {chunk.offset} of {len(chunk.data)} bytes, expected {start}..{end}")
            try:
                part = await self._whole.work(partial(decode, chunk.data, end - start))
            except BadCode as bad:
                raise BadMessage(f"chunk at {start}: {bad}") from bad
            if self._over:  # the next attempt may be using the memory of the mean
                raise BadMessage("that attempt is over")
            yield start, part
            await asyncio.sleep(0)  # nothing above yields while chunks are here already
        if next(awaited, None) is not None:
            raise BadMessage("the stream ended early")


def _first(chunks: Sequence[Range]) -> int:
    return chunks[0][0] if chunks else 0


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
