"""Leads a stream that comes in to the attempt that it belongs to: it may come a moment before our own proposal does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pier.v1.peer_pb2 import Chunk
from pier_node.outer.attempt import Attempt
from pier_node.outer.reduce import Reduction
from pier_node.signals import Signal
from pier_node.wire.carrier import BadMessage

EARLY = 30.0
"""Seconds that a stream of an attempt we have not heard of yet may wait for us."""


class Streams:
    """Takes the streams that members push.

    Args:
        news: notified when another attempt is under way.
        attempt: the one that is under way now.
        is_stale: whether the stream that opens with this chunk is of an attempt that is over.
    """

    def __init__(self, news: Signal, attempt: Callable[[], Attempt | None], is_stale: Callable[[Chunk], bool]) -> None:
        self._news, self._attempt, self._is_stale = news, attempt, is_stale

    async def take(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        """Handle a stream to its end. Raises BadMessage."""
        first = await anext(chunks, None)
        if first is None:
            raise BadMessage("an empty stream")
        reduction = await self._reduction_of(first)
        await reduction.take(sender, first, chunks)

    async def _reduction_of(self, first: Chunk) -> Reduction:
        try:
            async with asyncio.timeout(EARLY):
                await self._news.until(lambda: self._is_stale(first) or self._current(first) is not None)
        except TimeoutError as error:
            raise BadMessage("no such attempt") from error
        reduction = self._current(first)
        if reduction is None:
            raise BadMessage("that attempt is over")
        return reduction

    def _current(self, first: Chunk) -> Reduction | None:
        attempt = self._attempt()
        return attempt.reduction if attempt and attempt.ballot == first.ballot else None
