"""An attempt against one process that runs the same skipped graph, in any order of arrival; what is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from pipeline.cases import config, iteration_plan, outcomes, reference, workers, worths
from pipeline.planning.cases import problem
from simulation.network import Weather
from simulation.virtual_time import run

from pier_node.pipeline.activations import Activations
from pier_node.pipeline.attempt import Worth
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import Totals
from pier_node.pipeline.planning.routing import random_routes
from pier_node.rounds.suspects import Suspicion
from pier_proto.v1.peer_pb2 import Total

SIX = [0, 0, 1, 1, 2, 3]
"""Stages of the sites a to f."""
SKIPPED = [[0, 2, 4], [0, 3, 5], [1, 2, 5], [1, 4, 5], [0, 3, 4], [1, 2, 4]]
PAIRS = ((0, 1), (2, 3), (4, 5))
PERMUTED = random_routes(problem(6, 3, path_length=3, waves=2), PAIRS, seed=1, step=0)
KINDS = {
    "one site a stage": (config(), iteration_plan([0, 1, 2, 3], [[0, 1, 2, 3]] * 3, [2, 1])),
    "replicas and skips": (config(), iteration_plan(SIX, SKIPPED, [3, 3])),
    "untied, a swap": (config(tied=False), iteration_plan(SIX, [[0, 4, 2], [1, 5, 4], [0, 3, 5]])),
    "random routes": (config(3), iteration_plan([0, 0, 1, 1, 2, 2], PERMUTED.paths, [4, 4])),
    "gpt2": (config(form="gpt2"), iteration_plan(SIX, SKIPPED)),
    "stages that nobody visits": (config(), iteration_plan(SIX, [[0, 2], [0, 2], [1, 2]])),
}


def attempt(kind: str, weather: Weather | None = None, seed: int = 1) -> tuple[Plan, dict[str, Worth]]:
    tables, message = KINDS[kind]
    plan = Plan.read(message, tables.pipeline.stages)

    async def main() -> dict[str, Worth]:
        return await worths(await workers(tables, plan, weather or Weather(delay=0.01, jitter=0.0), seed))

    return plan, run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(kind: str) -> None:
    plan, found = attempt(kind)
    means, square, loss = reference(KINDS[kind][0], plan)
    for node, worth in found.items():
        expected = means.get(plan.stages[node])
        if expected is None:
            assert not worth.gradient.any()
        else:
            np.testing.assert_allclose(worth.gradient, expected, rtol=1e-4, atol=1e-6)
            assert np.abs(expected).max() > 1e-3
        assert worth.total.square == pytest.approx(square, rel=1e-4)
        assert worth.total.loss == pytest.approx(loss, rel=1e-5)


def test_replicas_hold_the_same_bits() -> None:
    plan, found = attempt("replicas and skips")
    for stage in (0, 1):
        one, other = (found[node].gradient for node in plan.replicas(stage))
        assert np.array_equal(one, other)


@pytest.mark.parametrize("seed", range(2, 6))
def test_the_order_of_arrival_changes_no_bit(seed: int) -> None:
    _, calm = attempt("replicas and skips")
    _, wild = attempt("replicas and skips", Weather(delay=0.01, jitter=1.0), seed)
    for node, worth in calm.items():
        assert np.array_equal(worth.gradient, wild[node].gradient)
        assert worth.total == wild[node].total


@pytest.mark.parametrize(
    "told",
    [Total(moved=[900], digests=[b"9" * 32]), Total(moved=[0]), Total(digests=[b"9" * 32])],
    ids=["a stage that nobody holds", "no bits", "bits of nothing"],
)
def test_totals_that_cannot_be_of_the_plan_are_refused(monkeypatch: pytest.MonkeyPatch, told: Total) -> None:
    tables, message = KINDS["one site a stage"]
    monkeypatch.setattr(Totals, "all", lambda _: told)

    async def main() -> list[Worth | BaseException]:
        return await outcomes(await workers(tables, Plan.read(message, 4)))

    assert all(isinstance(it, Suspicion) for it in run(main()))


def test_a_tensor_that_cannot_be_sent_ends_the_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise OSError("no buffer space")

    tables, message = KINDS["one site a stage"]
    monkeypatch.setattr(Activations, "send", broken)

    async def main() -> list[Worth | BaseException]:
        async with asyncio.timeout(20.0):
            return await outcomes(await workers(tables, Plan.read(message, 4)))

    assert all("no buffer space" in str(it) for it in run(main()))
    assert "a tensor could not be sent" in caplog.text
