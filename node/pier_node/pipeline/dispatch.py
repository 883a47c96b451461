"""Routes incoming streams and requests to the running attempt, to the round, or to the states that this site serves.

A stream or a plan may arrive shortly before this site knows of its attempt. It then waits, for a limited time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from pier_node.base.tasks import Signal
from pier_node.outer.state import OuterState
from pier_node.pipeline.joint import Joint
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import DESCRIBE, DROP, TALLY, BadMessage, Carrier
from pier_node.wire.state_server import LiveMoments, Prove, StateServer
from pier_proto.v1.peer_pb2 import Ack, Chunk, Dropped, FetchRequest, Manifest, StateRequest, Total, Worked

EARLY = 30.0
"""Seconds that a stream may wait for an attempt that this site has not heard of yet."""
Push = Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]


class Dispatch:
    """Serves streams, tallies and drops on a carrier.

    Args:
        rounds: receives the streams of rounds.
        attempt: returns the running attempt.
        begun: returns the name of the last attempt that this site has taken part in.
        committed: returns the last round that this site knows to be decided.
        news: notified when one of these changes.
    """

    def __init__(
        self,
        carrier: Carrier,
        rounds: Push,
        attempt: Callable[[], Joint[object] | None],
        begun: Callable[[], bytes],
        committed: Callable[[], int],
        news: Signal,
    ) -> None:
        self._rounds, self._attempt, self._committed, self._news = rounds, attempt, committed, news
        self._begun = begun
        carrier.serve_push(self._take)
        carrier.serve(TALLY, self._tally)
        carrier.serve(DROP, self._drop)

    async def _take(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        first = await anext(chunks, None)
        if first is None:
            raise BadMessage("an empty stream")
        if first.stage == Chunk.STAGE_ACTIVATION:
            name = bytes(first.activation.attempt)
        elif first.stage in (Chunk.STAGE_SCATTER, Chunk.STAGE_GATHER) and first.meeting:
            name = bytes(first.meeting)
        else:
            await self._rounds(sender, _again(first, chunks))
            return
        attempt = await self._named(name, first.round)
        await attempt.take(sender, first, chunks)

    async def _tally(self, sender: str, worked: Worked) -> Total:
        attempt = await self._named(bytes(worked.attempt), worked.round)
        return await attempt.tally(sender, worked)

    async def _drop(self, sender: str, dropped: Dropped) -> Ack:
        attempt = self._attempt()
        if attempt and attempt.plan.name == dropped.attempt and sender in attempt.plan.stages:
            attempt.drop(Suspicion(dropped.suspect, f"{sender} gave up: {dropped.reason}"))
        return Ack()

    async def _named(self, name: bytes, round: int) -> Joint[object]:
        def settled() -> bool:
            return self._begun() == name or self._committed() >= round

        try:
            async with asyncio.timeout(EARLY):
                await self._news.until(settled)
        except TimeoutError as error:
            raise BadMessage("no such attempt") from error
        attempt = self._attempt()
        if attempt is None or attempt.plan.name != name:
            raise BadMessage("late: that attempt is over")
        return attempt


class States:
    """Serves the state of the run, and the state of the stage that this site holds, to peers that request them.

    Args:
        run: returns the state of a round, as in wire/state_server.py.
        stage: returns the stage that is held here, and its state.
        moments: AdamW's moments, if replicas have their own.
        prove: returns the proof of the run's state.
    """

    def __init__(
        self,
        carrier: Carrier,
        run: Callable[[int, bool], OuterState | None],
        stage: Callable[[], tuple[int | None, OuterState | None]],
        moments: LiveMoments,
        prove: Prove,
    ) -> None:
        self._stage = stage
        self._of_stage = StateServer(carrier, self._offer, moments)
        self._of_run = StateServer(carrier, run, lambda: None, prove)
        carrier.serve(DESCRIBE, self._describe)
        carrier.serve_pull(self._fetch)

    def _offer(self, version: int, _shadow: bool) -> OuterState | None:
        state = self._stage()[1]
        return state if state and version in (0, state.round) else None

    async def _describe(self, peer: str, request: StateRequest) -> Manifest:
        return await self._server(request.stage).describe(peer, request)

    async def _fetch(self, peer: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        async for chunk in self._server(request.stage).fetch(peer, request):
            yield chunk

    def _server(self, stage: int) -> StateServer:
        if stage and stage - 1 != self._stage()[0]:
            raise BadMessage(f"stage {stage - 1} is not held here")
        return self._of_stage if stage else self._of_run


async def _again(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk
