"""The data exchange of one pair: both sites send their vectors at the same time, and both end with the same means.

A mean is made of the bytes that travel, one's own part included, so both sides agree bit by bit whatever the codec does
to a chunk; the order of two terms does not matter. Chunks are merged as they arrive: the first of two waits in the
mean's own memory for its counterpart, so a swap needs no memory beyond the means.

With γ ≠ β a pair needs mean(φ), and φ is known as soon as the last round is taken. So φ is sent to the expected partner
while the workers train (Prefetch), and only the weights are left for the swap. An anchor that did not arrive in time,
or went to another site, goes with the swap: nothing ever waits for an anchor sent ahead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import Buffer, Vector
from pier_node.base.tasks import cancel_and_wait, first_of, run_to_end
from pier_node.outer.codec import BadCode, Codec
from pier_node.outer.mean import Values, norm_limit
from pier_node.outer.state import OuterState
from pier_node.rounds.exchange_plan import CHUNK
from pier_node.rounds.reduce import NO_DATA, Meter, send
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import BadMessage, Carrier, Chunk, PeerLost

log = logging.getLogger(__name__)

T = TypeVar("T")
HALF = np.float32(0.5)
GLANCE = 1.0
"""Seconds without progress after which to check the roster."""


@dataclass(frozen=True)
class SwapPlan:
    """What the two sites know of their meeting.

    Attributes:
        norm_limit: largest L2 norm that a vector of the partner may have.
        silence: seconds without progress in either direction after which the partner counts as lost.
        alive: returns whether the partner is alive on the roster; if it is not, the swap ends sooner.
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
        held: the partner's vector, if it came ahead; then it is not received again.
        wanted: whether the partner still needs our vector.
        error: receives what a lossy codec drops of our vector.
    """

    mine: Vector
    mean: Vector
    held: Vector | None = None
    wanted: bool = True
    error: Values | None = None


class Swap:
    """One side of a pair's exchange.

    Args:
        lanes: the same at both sides, in the same order; the first lane is the weights.

    Attributes:
        longest_wait: longest time without progress, in seconds.
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
        raise await asyncio.shield(self._broken)

    async def _watch(self) -> NoReturn:
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
            lane.error[part] = values - decoded
        return data, decoded

    async def _work(self, work: Callable[[], T]) -> T:
        """Run codecs in a thread, as they take long enough for it; a copy does not.

        It is finished even if the meeting ends: what it writes to is the next meeting's.
        """
        return await run_to_end(asyncio.to_thread(work)) if self._codec.lossy else work()


HELD = 2
"""Number of anchors kept here: one of this round, and one of the next round from a partner that is ahead."""
SILENCE = 60.0
"""Seconds for a chunk of an anchor, which takes the memory of the whole one while it arrives."""


@dataclass
class _Held:
    digest: bytes
    anchor: Vector
    whole: bool = False


class Prefetch:
    """What one site sends ahead, and what it holds of others.

    Args:
        expected: returns the site that this site would meet in a round.
    """

    def __init__(
        self,
        carrier: Carrier,
        roster: Roster,
        expected: Callable[[int], str],
        state: Callable[[], OuterState],
        codec: Codec,
        chunk: int,
    ) -> None:
        self._carrier, self._roster, self._expected, self._state = carrier, roster, expected, state
        self._codec, self._chunk = codec, chunk
        self._held: dict[str, _Held] = {}
        self._sending: asyncio.Task[None] | None = None

    def digest_of(self, node: str) -> bytes:
        """Digest of the state whose anchor a site sent ahead; "" if no anchor of it is here."""
        held = self._held.get(node)
        return held.digest if held and held.whole else b""

    def anchor_of(self, node: str, digest: bytes) -> Vector | None:
        """The anchor that a site sent ahead, if it belongs to the state with this digest."""
        return self._held[node].anchor if digest and self.digest_of(node) == digest else None

    def begin(self, number: int) -> None:
        """Send our anchor to the site expected in that round, and to another one if the expectation changes."""
        self._sending = asyncio.create_task(self._send(number, self._state()), name="anchor ahead")

    async def end(self) -> None:
        """Stop sending: the round has come."""
        if self._sending is not None:
            await cancel_and_wait(self._sending)
            self._sending = None

    async def _send(self, number: int, state: OuterState) -> None:
        done = [""]
        while True:
            await self._roster.changed.until(lambda: self._expected(number) not in done)
            done[1:] = [self._expected(number)]
            try:
                async with aclosing(self._outgoing(number, state)) as chunks:
                    await self._carrier.push(done[-1], chunks)
            except PeerLost as lost:
                log.info("the anchor for round %d goes with the swap: %s", number, lost)

    async def _outgoing(self, number: int, state: OuterState) -> AsyncGenerator[Chunk]:
        yield Chunk(round=number, meeting=state.digest, stage=Chunk.STAGE_ANCHOR, data=NO_DATA)
        anchor = state.anchor
        for start in range(0, len(anchor), self._chunk):
            data = self._codec.encode(anchor[start : start + self._chunk])
            yield Chunk(stage=Chunk.STAGE_ANCHOR, offset=start, data=data)

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive the anchor of a site that we expect to meet. Raises BadMessage."""
        coming = self._state().round + 1
        if first.round not in (coming, coming + 1) or self._expected(first.round) != sender:
            raise BadMessage(f"we do not expect to meet in round {first.round}")
        held = self._room_for(sender, first.meeting)
        try:
            await self._fill(held.anchor, rest)
            held.whole = True
        finally:
            if not held.whole and self._held.get(sender) is held:
                del self._held[sender]

    async def _fill(self, anchor: Vector, rest: AsyncIterator[Chunk]) -> None:
        done, squares, limit = 0, 0.0, norm_limit(self._state().norm)
        async for chunk in _in_time(rest):
            try:
                part = self._codec.decode(chunk.data, min(self._chunk, len(anchor) - done))
            except BadCode as bad:
                raise BadMessage(f"an anchor at {done}: {bad}") from bad
            squares += float(np.dot(part, part))
            if chunk.offset != done or not squares <= limit**2:
                raise BadMessage("an anchor out of order, not finite, or too long")
            anchor[done : done + len(part)] = part
            done += len(part)
        if done < len(anchor):
            raise BadMessage("the stream ended early")

    def _room_for(self, sender: str, digest: bytes) -> _Held:
        if sender in self._held and not self._held[sender].whole:
            raise BadMessage("another anchor of yours is arriving")
        self._held.pop(sender, None)
        if len(self._held) >= HELD:
            oldest = next(iter(self._held))
            if not self._held[oldest].whole:
                raise BadMessage("other anchors are arriving")
            del self._held[oldest]
        held = self._held[sender] = _Held(digest, np.empty(len(self._state().anchor), np.float32))
        return held


async def _in_time(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """The chunks, each within SILENCE. Raises BadMessage."""
    while True:
        try:
            async with asyncio.timeout(SILENCE):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise BadMessage(f"nothing of an anchor came for {SILENCE:.0f} s") from error
        if chunk is None:
            return
        yield chunk
