"""An attempt against one process that runs the same skipped graph; the order of a site's tasks; what is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline.cases import BATCH, CONTEXT, Worker, config, iteration_plan, outcomes, reference, workers, worths
from pipeline.planning.cases import problem
from simulation.network import Weather
from simulation.virtual_time import run
from torch import Tensor

from pier_node.pipeline.activation_codec import TensorFormat, pieces
from pier_node.pipeline.attempt import Activations, AttemptResult, MicrobatchQueue
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import Overflow, Totals
from pier_node.pipeline.planning.plan import random_routes
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import BadMessage, Chunk, PeerRefused
from pier_proto.v1.peer_pb2 import Total, Worked

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


def attempt(kind: str, weather: Weather | None = None, seed: int = 1) -> tuple[Plan, dict[str, AttemptResult]]:
    tables, message = KINDS[kind]
    plan = Plan.read(message, tables.pipeline.stages)

    async def main() -> dict[str, AttemptResult]:
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

    async def main() -> list[AttemptResult | BaseException]:
        return await outcomes(await workers(tables, Plan.read(message, 4)))

    assert all(isinstance(it, Suspicion) for it in run(main()))


def test_a_tensor_that_cannot_be_sent_ends_the_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise OSError("no buffer space")

    tables, message = KINDS["one site a stage"]
    monkeypatch.setattr(Activations, "send", broken)

    async def main() -> list[AttemptResult | BaseException]:
        async with asyncio.timeout(20.0):
            return await outcomes(await workers(tables, Plan.read(message, 4)))

    assert all("no buffer space" in str(it) for it in run(main()))
    assert "a tensor could not be sent" in caplog.text


def test_who_takes_a_tensor_and_never_says_so_is_suspected() -> None:
    """Whoever waits for the sender would suspect that one."""
    tables, message = KINDS["one site a stage"]

    async def main() -> list[AttemptResult | BaseException]:
        made = await workers(tables, Plan.read(message, 4))
        b = made[1]
        take = b.carrier.on_push
        assert take

        async def silent(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            await take(sender, chunks)
            await asyncio.Event().wait()

        b.carrier.on_push = silent
        async with asyncio.timeout(1000.0):
            return await outcomes(made)

    first, *_ = run(main())
    assert isinstance(first, Suspicion)
    assert first.node == "b"


@pytest.mark.parametrize("claim", ["square", "loss"])
def test_who_claims_more_than_can_be_is_suspected(claim: str) -> None:
    """The total of such numbers is infinite, and the site that tells it would be suspected."""
    tables, message = KINDS["one site a stage"]

    async def main() -> list[AttemptResult | BaseException]:
        made = await workers(tables, Plan.read(message, 4))
        b = made[1].attempt
        monstrous = Worked(attempt=b.plan.name, round=1, square=1e300, loss=0.0)
        setattr(monstrous, claim, 1.7e308)
        b._worked = lambda **_: monstrous  # type: ignore[method-assign]
        return await outcomes(made)

    a, _, c, d = run(main())
    assert {it.node for it in (a, c, d) if isinstance(it, Suspicion)} == {"b"}


RUN = config(stages=2, layers=2)
PLAN = Plan.read(iteration_plan([0, 1], [[0, 1], [0, 1]]), 2)
RIGHT = torch.zeros(BATCH, CONTEXT, RUN.model.dim)


def stream(tensor: Tensor, codec: str = "none", microbatch: int = 0, hop: int = 1) -> list[Chunk]:
    form = TensorFormat(codec, tensor.shape)
    return [*pieces(form.activation(PLAN.name, microbatch, hop), form.encode(tensor.numpy()), 1)]


def cut(chunks: list[Chunk]) -> list[Chunk]:
    chunks[-1].data = chunks[-1].data[:-4]
    return chunks


def twice(chunks: list[Chunk]) -> list[Chunk]:
    return [*chunks, chunks[-1]]


REFUSED: dict[str, tuple[Callable[[], list[Chunk]], str]] = {
    "shape": (lambda: stream(RIGHT[:, :-1]), "a tensor of shape"),
    "codec": (lambda: stream(RIGHT, "int8"), "a tensor of DTYPE_INT8, expected DTYPE_FP32: have all sites"),
    "no such microbatch": (lambda: stream(RIGHT, microbatch=2), "microbatch 2, hop 1: the plan has none"),
    "no such hop": (lambda: stream(RIGHT, hop=5), "microbatch 0, hop 5: the plan has none"),
    "another's route": (lambda: stream(RIGHT, hop=2), "the plan leads from b to a, not from a to b"),
    "too short": (lambda: cut(stream(RIGHT)), "bytes, expected"),
    "too long": (lambda: twice(stream(RIGHT)), "a chunk at 0"),
    "ends early": (lambda: stream(RIGHT)[:1], "a stream that ends after 0 of"),
}


async def sent(worker: Worker, chunks: list[Chunk], to: str = "b") -> str:
    """How a stream was refused; "" if it was taken."""

    async def all_of_it() -> AsyncIterator[Chunk]:
        for chunk in chunks:
            yield chunk

    try:
        await worker.carrier.push(to, all_of_it())
    except PeerRefused as refused:
        return refused.reason
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_as_planned_is_refused_and_harmless(kind: str) -> None:
    chunks, reason = REFUSED[kind]

    async def main() -> tuple[str, Any, Any]:
        plain = await worths(await workers(RUN, PLAN))
        made = await workers(RUN, PLAN)
        said = await sent(made[0], chunks())
        return said, plain, await worths(made)

    said, plain, found = run(main())
    assert reason in said
    for node, worth in plain.items():
        assert np.array_equal(worth.gradient, found[node].gradient)


@pytest.mark.parametrize(
    ("value", "reason"), [("nan", "not finite"), ("-inf", "not finite"), ("3e38", "no stage sends")]
)
def test_who_sends_values_that_no_stage_sends_is_suspected(value: str, reason: str) -> None:
    bad = RIGHT.clone()
    bad[0, 0, 0] = float(value)

    async def main() -> tuple[str, list[AttemptResult | BaseException]]:
        made = await workers(RUN, PLAN)
        return await sent(made[0], stream(bad)), await outcomes(made)

    said, (_, found) = run(main())
    assert reason in said
    assert isinstance(found, Suspicion)
    assert (found.node, reason in found.reason) == ("a", True)


def too_large(*_: Any) -> Tensor:
    return torch.full(RIGHT.shape, 2e8)


def infinite(*_: Any) -> tuple[float, Tensor]:
    return float("inf"), RIGHT


def full(out: Tensor) -> None:
    out.fill_(float("inf"))


@pytest.mark.parametrize(
    ("stage", "name", "result", "own", "suspect"),
    [
        (0, "embed", too_large, True, ""),
        (1, "forward", too_large, False, "a"),
        (2, "backward", too_large, False, "a"),
        (0, "loss", infinite, False, "c"),
        (1, "mean_gradient", full, False, ""),
        (0, "mean_gradient", full, False, "c"),
    ],
)
def test_a_result_that_is_too_large_is_blamed_on_the_sender_of_its_input(
    stage: int, name: str, result: Any, own: bool, suspect: str
) -> None:
    plan = Plan.read(iteration_plan([0, 1, 2], [[0, 1, 2]] if name != "mean_gradient" or stage else [[0, 2]]), 3)

    async def main() -> AttemptResult | BaseException:
        made = await workers(config(stages=3, layers=3), plan)
        setattr(made[stage].stage, name, result)
        return (await outcomes(made))[stage]

    found = run(main())
    assert isinstance(found, Overflow)
    assert (found.own, found.node) == (own, suspect)


def test_what_comes_again_or_late_is_refused() -> None:
    async def main() -> tuple[str, str]:
        made = await workers(RUN, PLAN)
        assert await sent(made[0], stream(RIGHT)) == ""
        again = await sent(made[0], stream(RIGHT))
        for worker in made:
            await worker.roster.stop()
        made = await workers(RUN, PLAN)
        await worths(made)
        return again, await sent(made[0], stream(RIGHT))

    again, late = run(main())
    assert "it is here already" in again
    assert "late: that attempt is over" in late


@pytest.mark.parametrize(
    ("stages", "path", "reason"),
    [
        ([0, 1], [0, 2], "sites that take no part"),
        ([0, 1], [1, 0], "must begin at 0"),
        ([0, 1, 1], [0, 1, 2], "each once"),
    ],
)
def test_plans_that_are_none(stages: list[int], path: list[int], reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        Plan.read(iteration_plan(stages, [path]), 2)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(BadMessage, match="a model of 2 does not have"):
        Plan.read(iteration_plan([0, 2], [[0, 1]]), 2)
    with pytest.raises(BadMessage, match="with microbatches"):
        Plan.read(iteration_plan([0, 1], [[0, 1]], meet=True), 4)
    with pytest.raises(BadMessage, match="without microbatches"):
        Plan.read(iteration_plan([0, 1], []), 2)


TWO = Plan.read(iteration_plan([0, 1], [[0, 1]] * 4, [2, 2]), 2)
"""Four microbatches of a in two waves, through b. Hops: 0 at a, 1 at b, 2 loss at a, 3 at b, 4 at a."""


def test_own_new_microbatches_come_last() -> None:
    desk = MicrobatchQueue(TWO, "a", memory=3)
    assert desk.next() == (0, 0)
    desk.done((0, 0))
    desk.arrive((0, 2))
    assert desk.next() == (0, 2)
    desk.done((0, 2))
    assert [desk.next(), desk.next(), desk.next()] == [(1, 0), (2, 0), None]
    desk.arrive((0, 4))
    assert desk.next() == (0, 4)
    desk.done((0, 4))
    assert desk.next() == (3, 0)


def test_paths_that_swap_stages_keep_waves_apart() -> None:
    swapped = Plan.read(iteration_plan([0, 1, 2], [[0, 2, 1], [0, 1, 2], [0, 1, 2]], [2, 1]), 3)
    desk = MicrobatchQueue(swapped, "a", memory=3)
    assert [desk.next(), desk.next(), desk.next()] == [(0, 0), (1, 0), None]
    desk.done((0, 0))
    desk.arrive((0, 6))
    assert desk.next() == (0, 6)
    desk.done((0, 6))
    assert desk.next() == (2, 0), "the one in its place of the wave before is over"


def test_earlier_waves_go_first() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=3)
    for task in ((2, 1), (1, 1), (0, 1)):
        desk.arrive(task)
    assert [desk.next(), desk.next(), desk.next()] == [(1, 1), (0, 1), (2, 1)]


def test_what_came_first_goes_first() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=3)
    for task in ((1, 1), (0, 1), (1, 3)):
        desk.arrive(task)
    assert [desk.next(), desk.next(), desk.next()] == [(1, 1), (0, 1), (1, 3)]


def test_a_forward_waits_for_a_free_place_and_a_backward_does_not() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=1)
    desk.arrive((0, 1))
    assert desk.next() == (0, 1)
    desk.done((0, 1))
    desk.arrive((1, 1))
    assert desk.next() is None
    desk.arrive((0, 3))
    assert desk.next() == (0, 3)
    desk.done((0, 3))
    assert desk.next() == (1, 1)


def test_what_is_awaited_is_what_has_not_come() -> None:
    desk = MicrobatchQueue(TWO, "b", memory=2)
    desk.arrive((0, 1))
    assert (0, 1) not in desk.awaited
    assert (1, 1) in desk.awaited


@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_task_is_done_once_whatever_the_order_of_arrival(memory: int, dice: random.Random) -> None:
    desks = {node: MicrobatchQueue(TWO, node, memory) for node in "ab"}
    under_way, held, seen = list[tuple[int, int]](), {"a": 0, "b": 0}, list[tuple[int, int]]()
    while not all(desk.finished for desk in desks.values()):
        for node, desk in desks.items():
            while (task := desk.next()) is not None:
                seen.append(task)
                held[node] += (task[1] < 2) - (task[1] > 2)
                assert held[node] <= memory
                desk.done(task)
                if task[1] < 4:
                    under_way.append((task[0], task[1] + 1))
        if under_way:
            task = under_way.pop(dice.randrange(len(under_way)))
            desks[TWO.ways[task[0]][task[1]]].arrive(task)
    assert sorted(seen) == sorted({*TWO.tasks("a"), *TWO.tasks("b")})
