from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from pier_node.rounds.reduce import send
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.carrier import Chunk, PeerLost, PeerRefused


class Line:
    """A carrier that takes a stream's first chunk, and then fails, if it shall."""

    def __init__(self, problem: Exception | None) -> None:
        self._problem = problem
        self.taken: list[int] = []

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        async for chunk in chunks:
            self.taken.append(chunk.offset)
            if self._problem:
                raise self._problem


@pytest.mark.parametrize(
    ("problem", "suspect", "reason"),
    [
        (PeerLost("bob", "cut off"), "bob", "cut off"),
        (PeerRefused("bob", "too large"), NOBODY, "bob refused what we sent: too large"),
    ],
)
async def test_what_goes_wrong_is_a_suspicion_and_the_stream_is_closed(
    problem: Exception, suspect: str, reason: str
) -> None:
    closed = False

    async def chunks() -> AsyncGenerator[Chunk]:
        nonlocal closed
        try:
            for offset in range(3):
                yield Chunk(offset=offset)
        finally:
            closed = True

    line: Any = Line(problem)
    with pytest.raises(Suspicion) as caught:
        await send(line, "bob", chunks())
    assert (caught.value.node, caught.value.reason) == (suspect, reason)
    assert closed
    assert line.taken == [0]


async def test_all_of_a_stream_is_sent() -> None:
    async def chunks() -> AsyncGenerator[Chunk]:
        for offset in range(3):
            yield Chunk(offset=offset)

    line: Any = Line(None)
    await send(line, "bob", chunks())
    assert line.taken == [0, 1, 2]
