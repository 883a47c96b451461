"""The data exchange of one pair: both sites send their vectors at the same time, and both end with the same means.

A mean is made of the bytes that travel, one's own part included, so both sides agree bit by bit whatever the codec does
to a chunk; the order of two terms does not matter. Chunks are merged as they arrive: the first of two waits in the
mean's own memory for its counterpart, so a swap needs no memory beyond the means.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import Buffer, Vector
from pier_node.base.tasks import first_of
from pier_node.outer.codec import BadCode, Codec
from pier_node.rounds.plan import CHUNK
from pier_node.rounds.reduce import NO_DATA, Meter, send
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import BadMessage, Carrier, PeerLost
from pier_node.wire.chunk import Chunk

T = TypeVar("T")
HALF = np.float32(0.5)
GLANCE = 1.0
"""Seconds without progress after which to check the roster."""


@dataclass(frozen=True)
class SwapPlan:
    """What the two sites know of their meeting.

    Attributes:
        meeting: name of the meeting.
        norm_limit: largest L2 norm that a vector of the partner may have.
        silence: seconds without progress in either direction after which the partner counts as lost.
        alive: returns whether the partner is alive on the roster; if it is not, the swap ends sooner.
        chunk: number of elements in a chunk.
    """

    round: int
    meeting: bytes
    partner: str
    norm_limit: float
    silence: float
    alive: Callable[[], bool]
    chunk: int = CHUNK


@dataclass(frozen=True)
class Lane:
    """One vector of each side, and their mean; all of shape [parameters].

    Attributes:
        mean: receives the mean.
        held: the partner's vector, if it came ahead; then it is not received again.
        wanted: whether the partner still needs our vector.
        error: receives what a lossy codec drops of our vector.
    """

    mine: Vector
    mean: Vector
    held: Vector | None = None
    wanted: bool = True
    error: Vector | None = None


class Swap:
    """One side of a pair's exchange.

    Args:
        lanes: the same at both sides, in the same order; the first lane is the weights.

    Attributes:
        longest_wait: longest time without progress, in seconds.
        meter: what we sent, and when.
    """

    def __init__(
        self, carrier: Carrier, plan: SwapPlan, lanes: Sequence[Lane], codec: Codec, faults: Faults = NO_FAULTS
    ) -> None:
        self._carrier, self._plan, self._lanes, self._codec, self._faults = carrier, plan, lanes, codec, faults
        self._length = len(lanes[0].mine)
        self._ranges = [(start, min(start + plan.chunk, self._length)) for start in range(0, self._length, plan.chunk)]
        self._half_done: set[tuple[int, int]] = set()
        self._squares = [0.0] * len(lanes)
        self._apart = 0.0
        self._opened = self._over = False
        self._received = asyncio.Event()
        self._moved = asyncio.Event()
        self._broken: asyncio.Future[Suspicion] = asyncio.get_running_loop().create_future()
        self.longest_wait = 0.0
        self.meter = Meter(asyncio.get_running_loop().time())
        for number, lane in enumerate(lanes):
            if lane.held is not None:
                lane.mean[:] = lane.held
                self._half_done.update((number, start) for start, _ in self._ranges)

    @property
    def spread(self) -> float:
        """Unbiased estimate of the replicas' standard deviation: two of them differ by twice its square, on average."""
        return float(np.sqrt(self._apart / (2 * self._length)))

    async def run(self) -> None:
        """Swap all vectors; after that the means are complete. Raises Suspicion."""
        try:
            await first_of(self._swap(), self._until_broken(), self._watch())
        finally:
            self._over = True

    async def _swap(self) -> None:
        await send(self._carrier, self._plan.partner, self._outgoing())
        if any(lane.held is None for lane in self._lanes):
            await self._received.wait()

    async def _until_broken(self) -> NoReturn:
        """Raise Suspicion once the partner's stream has failed."""
        raise await asyncio.shield(self._broken)

    async def _watch(self) -> NoReturn:
        """Raise Suspicion once nothing has moved for too long."""
        loop, plan = asyncio.get_running_loop(), self._plan
        began = loop.time()
        while True:
            self._moved.clear()
            try:
                async with asyncio.timeout(min(GLANCE, plan.silence)):
                    await self._moved.wait()
            except TimeoutError as error:
                if loop.time() - began >= plan.silence or not plan.alive():
                    raise Suspicion(plan.partner, f"nothing moved for {loop.time() - began:.0f} s") from error
                continue
            self.longest_wait, began = max(self.longest_wait, loop.time() - began), loop.time()

    async def _outgoing(self) -> AsyncGenerator[Chunk]:
        """Our vectors. Chunks that the partner already has are merged here too, but not sent."""
        plan, loop = self._plan, asyncio.get_running_loop()
        yield Chunk(round=plan.round, meeting=plan.meeting, stage=Chunk.STAGE_SWAP, data=NO_DATA)
        for number, lane in enumerate(self._lanes):
            for start, end in self._ranges:
                data, mine = await self._work(partial(self._encoded, lane, slice(start, end)))
                self._merge(number, start, mine)
                if lane.wanted:
                    yield Chunk(stage=Chunk.STAGE_SWAP, offset=number * self._length + start, data=data)
                    self.meter.sent(len(data), loop.time())
                self._moved.set()

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive the partner's stream. Raises BadMessage: the sender is told, and the swap fails."""
        if sender != self._plan.partner or self._opened:
            raise BadMessage("a second stream of the same kind" if self._opened else f"{sender} is not our partner")
        self._opened = True
        try:
            await self._take(first, rest)
        except (BadMessage, PeerLost) as error:
            if not self._broken.done():
                reason = error.reason if isinstance(error, PeerLost) else str(error)
                self._broken.set_result(Suspicion(sender, reason))
            raise

    async def _take(self, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        if first.data:
            raise BadMessage("a stream opens with an empty chunk that names it")
        owed = iter(
            [(number, *it) for number, lane in enumerate(self._lanes) if lane.held is None for it in self._ranges]
        )
        async for chunk in rest:
            number, start, end = next(owed, (0, 0, 0))
            part = await self._checked(chunk, number, start, end)
            if self._over:  # the next swap may be using the means
                raise BadMessage("that meeting is over")
            self._merge(number, start, part)
            self._moved.set()
            await self._faults.reach(self._plan.round, "exchanging")
        if next(owed, None) is not None:
            raise BadMessage("the stream ended early")
        self._received.set()

    async def _checked(self, chunk: Chunk, number: int, start: int, end: int) -> Vector:
        """The partner's part of a vector. Raises BadMessage if it is not what is owed, not finite, or too long."""
        offset = number * self._length + start
        if chunk.offset != offset or start == end:
            raise BadMessage(f"a chunk at {chunk.offset}, expected {offset} to {offset + end - start}")
        try:
            theirs = await self._work(partial(self._codec.decode, chunk.data, end - start))
        except BadCode as bad:
            raise BadMessage(f"a chunk at {chunk.offset}: {bad}") from bad
        self._squares[number] += float(np.dot(theirs, theirs))
        if not self._squares[number] <= self._plan.norm_limit**2:
            raise BadMessage(f"not finite, or of a norm above {self._plan.norm_limit:.3g}")
        return theirs

    def _merge(self, number: int, start: int, part: Vector) -> None:
        """Merge one part of a chunk: the first of the two parts waits in the mean, and the second completes it."""
        mean = self._lanes[number].mean[start : start + len(part)]
        if (number, start) not in self._half_done:
            self._half_done.add((number, start))
            mean[:] = part
            return
        if number == 0:
            between = part - mean
            self._apart += float(np.dot(between, between))
        np.add(mean, part, out=mean)
        np.multiply(mean, HALF, out=mean)

    def _encoded(self, lane: Lane, part: slice) -> tuple[Buffer, Vector]:
        """A chunk as it travels, and its values as both sides decode them."""
        values = lane.mine[part]
        data = self._codec.encode(values)
        decoded = self._codec.decode(data, len(values))
        if lane.error is not None:
            np.subtract(values, decoded, out=lane.error[part])
        return data, decoded

    async def _work(self, work: Callable[[], T]) -> T:
        """Run codecs in a thread, as they take long enough for it; a copy does not."""
        return await asyncio.to_thread(work) if self._codec.lossy else work()
