"""An iteration takes as long as the planner's simulator says, if tasks and lines take as long as their sites told."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from pipeline.cases import Worker, config, outcomes, workers
from simulation.network import Weather
from simulation.virtual_time import run

from pier_node.pipeline.attempt import AttemptResult
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.planner import Planner
from pier_node.pipeline.planning.plan import Plan as Paths
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.search import search
from pier_node.pipeline.planning.simulator import makespan
from pier_node.pipeline.vote_state import VoteState
from pier_proto.v1.peer_pb2 import IterationPlan, Place, Pulse, Site

HELD = {6: (0, 0, 1, 1, 2, 3), 9: (0, 0, 0, 1, 1, 2, 2, 3, 3)}
VOTED = VoteState(5, 3.0, (7 << 24,) * 4)
KINDS = {"embed": "forward", "forward": "forward", "loss": "loss", "backward": "backward"}


def places(sites: int, seed: int) -> dict[str, Place]:
    """Sites of unequal speed on unequal uplinks."""
    dice, nodes = random.Random(seed), [chr(ord("a") + index) for index in range(sites)]
    found = {}
    for node, stage in zip(nodes, HELD[sites], strict=True):
        forward, uplink = dice.uniform(0.5, 1.5), dice.uniform(0.1, 1.0)
        it = found[node] = Place(stage=stage, version=7 << 24, memory=3)
        it.forward, it.backward, it.loss = forward, 2.2 * forward, 0.3 * forward
        it.transfer.update({other: uplink for other in nodes if other != node})
    return found


async def planned(tables: Any, there: dict[str, Place]) -> tuple[IterationPlan, float]:
    """The plan of an attempt, and the seconds that it is said to take."""
    told = list[tuple[Problem, Paths]]()

    async def searched(problem: Problem, seed: int, _seconds: float, current: Paths, stay: bool) -> Paths:
        return search(problem, seed, 0.05, current if stay else None, deadline=math.inf).plan

    planner = Planner(tables, 1, 1000, lambda _, *found: told.append(found), searched)
    pulses = {node: Pulse(site=Site(node=node), place=place) for node, place in there.items()}
    message = await planner.plan(1, VOTED, pulses, {})
    return message, makespan(*told[-1])


def pace(worker: Worker, place: Place) -> None:
    """Have its tasks and what it sends take as long as it tells."""
    due, push, tools = [0.0], worker.carrier.push, worker.tools

    def timed(task: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            due[0] = seconds
            return task(*args)

        return noted

    async def compute(work: Callable[[], Any]) -> Any:
        due[0] = 0.0
        result = work()
        await asyncio.sleep(due[0])
        return result

    async def late(peer: str, chunks: Any) -> None:
        await asyncio.sleep(place.transfer[peer])
        await push(peer, chunks)

    for name, kind in KINDS.items():
        setattr(worker.stage, name, timed(getattr(worker.stage, name), getattr(place, kind)))
    vars(tools)["compute"] = compute
    vars(worker.carrier)["push"] = late


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sites", HELD)
@pytest.mark.parametrize("paths", ["full", "skip", "random"])
def test_the_prediction_holds(paths: str, sites: int, seed: int) -> None:
    tables, there = config(paths=paths, microbatches=9), places(sites, seed)

    async def main() -> tuple[float, float]:
        message, predicted = await planned(tables.pipeline, there)
        made = await workers(tables, Plan.read(message, 4), Weather(delay=1e-6, jitter=0.0))
        for worker in made:
            pace(worker, there[worker.node])
        found = await outcomes(made)
        assert all(isinstance(it, AttemptResult) for it in found), found
        return predicted, max(worker.attempt.spans.tasks for worker in made)

    predicted, measured = run(main())
    assert measured == pytest.approx(predicted, rel=0.01)
