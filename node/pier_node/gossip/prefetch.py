"""Anchors that are sent ahead: with γ ≠ β a pair needs mean(φ), and φ is known as soon as the last round is taken.

So φ is sent to the expected partner while the workers train, and only the weights are left for the swap. An anchor that
did not arrive in time, or went to another site, goes with the swap: nothing ever waits for an anchor sent ahead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from pier_node.base.shared import Vector
from pier_node.base.tasks import cancel_and_wait
from pier_node.outer.codec import BadCode, Codec
from pier_node.outer.state import OuterState
from pier_node.outer.update import norm_limit
from pier_node.rounds.reduce import NO_DATA
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import BadMessage, Carrier, PeerLost
from pier_node.wire.chunk import Chunk

HELD = 2
"""Number of anchors kept here: one of this round, and one of the next round from a partner that is ahead."""

log = logging.getLogger(__name__)


@dataclass
class _Held:
    digest: bytes
    anchor: Vector
    whole: bool = False


class Prefetch:
    """What one site sends ahead, and what it holds of others.

    Args:
        expected: returns the site that this site would meet in a round.
        state: returns this site's current state.
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
        if first.round <= self._state().round or self._expected(first.round) != sender:
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
        async for chunk in rest:
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
        self._held.pop(sender, None)
        if len(self._held) >= HELD:
            oldest = next(iter(self._held))
            if not self._held[oldest].whole:
                raise BadMessage("other anchors are arriving")
            del self._held[oldest]
        held = self._held[sender] = _Held(digest, np.empty(len(self._state().anchor), np.float32))
        return held
