"""Rounds that take much longer than those before: they are done, once the sites have learned to wait for them."""

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

from pier_node.config.run import RunConfig
from pier_node.outer.state import OuterState
from pier_node.wire.carrier import Chunk

INTERVAL = 9
"""Iterations before an outer round: so many short waits that they are believed."""


def apart(sites: int) -> RunConfig:
    """Of two stages, whose replicas meet once, at the end."""
    tables = config(2, layers=2, paths="full", microbatches=2).model_dump(mode="json")
    tables["run"]["sites"], tables["inner"]["total_steps"] = sites, INTERVAL
    tables["outer"] = {"algorithm": "pier", "start": "none", "inner_steps": INTERVAL}
    return RunConfig.model_validate(tables)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("seconds", "rounds"), [(45.0, INTERVAL + 1), (170.0, INTERVAL + 2)])
def test_an_outer_round_is_done_that_takes_much_longer_than_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    """The only site of a stage waits for nothing but the totals, while replicas of the other one average."""
    monkeypatch.setattr(SimCarrier, "_feed", slow(seconds, SimCarrier._feed))
    cluster = PipelineCluster(apart(3), tmp_path)
    run(cluster.run(within=1800.0))
    assert (cluster.voted().steps, cluster.voted().met) == (INTERVAL, INTERVAL)
    assert max(cluster.digests) == rounds, "longer than the first patience costs an attempt"


class OneIsLeftOut(PipelineCluster):
    """In the outer round d takes no part; it is one of four."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.took_part: set[str] = set()

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        training = self.nodes[name].training
        if state.round == INTERVAL:
            training._routing.suspect = "d"
        elif state.round > INTERVAL and training._tried:
            self.took_part.add(name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [45.0, 130.0])
def test_who_takes_no_part_does_not_end_a_round_that_others_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(SimCarrier, "_feed", slow(seconds, SimCarrier._feed))
    cluster = OneIsLeftOut(apart(4), tmp_path)
    run(cluster.run(within=1800.0))
    assert (cluster.voted().steps, cluster.voted().met) == (INTERVAL, INTERVAL)
    assert max(cluster.digests) == INTERVAL + 1, "nothing is done twice"
    assert cluster.took_part == set("abc")


class PlannerIsBack(PipelineCluster):
    """The site that plans is paused before the outer round, and goes on while the others are at it."""

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        if name == "a" and state.round == INTERVAL:
            orders = self.nodes[name].orders
            orders.take(1, True)
            asyncio.get_running_loop().call_later(30.0, orders.take, 2, False)


def test_a_planner_that_is_back_leaves_the_others_to_what_they_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SimCarrier, "_feed", slow(45.0, SimCarrier._feed))
    cluster = PlannerIsBack(apart(4), tmp_path)
    run(cluster.run(within=1800.0))
    assert (cluster.voted().steps, cluster.voted().met) == (INTERVAL, INTERVAL)
    assert max(cluster.digests) == INTERVAL + 1
    assert "the plan is dropped" not in caplog.text


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
