"""Rounds that take much longer than those before: they are done, once the sites have learnt to wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline.cases import config
from pipeline.cluster import PipelineCluster
from simulation.network import SimCarrier
from simulation.virtual_time import run

from pier.v1.peer_pb2 import Chunk
from pier_node.config import RunConfig

INTERVAL = 9
"""Iterations before an outer round: so many short waits that they are believed."""


@pytest.mark.parametrize(("seconds", "rounds"), [(45.0, INTERVAL + 1), (170.0, INTERVAL + 2)])
def test_an_outer_round_is_done_that_takes_much_longer_than_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    """The only site of a stage waits for nothing but the totals, while replicas of the other one average."""
    monkeypatch.setattr(SimCarrier, "_feed", slow(seconds, SimCarrier._feed))
    tables = config(2, layers=2, paths="full", microbatches=2).model_dump(mode="json")
    tables["run"]["sites"], tables["inner"]["total_steps"] = 3, INTERVAL
    tables["outer"] = {"algorithm": "pier", "start": "none", "inner_steps": INTERVAL}
    cluster = PipelineCluster(RunConfig.model_validate(tables), tmp_path)
    run(cluster.run(within=1800.0))
    assert (cluster.standing().steps, cluster.standing().met) == (INTERVAL, INTERVAL)
    assert max(cluster.digests) == rounds, "longer than the first patience costs an attempt"


Feed = Callable[[SimCarrier, str, AsyncIterator[Chunk], Any], Awaitable[None]]


def slow(seconds: float, feed: Feed) -> Feed:
    """Chunks of means take so much longer; activations do not."""

    async def late(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if chunk.meeting and chunk.data:
                await asyncio.sleep(seconds)
            yield chunk

    async def fed(carrier: SimCarrier, peer: str, chunks: AsyncIterator[Chunk], queue: Any) -> None:
        await feed(carrier, peer, late(chunks), queue)

    return fed
