"""What is refused of what comes in, by name, and that it harms nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch
from pipeline.cases import BATCH, CONTEXT, Worker, config, iteration_plan, workers, worths
from simulation.virtual_time import run
from torch import Tensor

from pier_node.pipeline.activations import activation_of, pieces
from pier_node.pipeline.iteration_plan import Plan
from pier_node.wire.carrier import BadMessage, PeerRefused
from pier_proto.v1.peer_pb2 import Activation, Chunk

RUN = config(stages=2, layers=2)
PLAN = Plan.read(iteration_plan([0, 1], [[0, 1], [0, 1]]), 2)
RIGHT = torch.zeros(BATCH, CONTEXT, RUN.model.dim)


def stream(tensor: Tensor, name: bytes = PLAN.name, microbatch: int = 0, hop: int = 1) -> list[Chunk]:
    return [*pieces(activation_of(name, microbatch, hop, tensor), tensor, 1)]


def cut(chunks: list[Chunk]) -> list[Chunk]:
    chunks[-1].data = chunks[-1].data[:-4]
    return chunks


def twice(chunks: list[Chunk]) -> list[Chunk]:
    return [*chunks, chunks[-1]]


REFUSED: dict[str, tuple[Callable[[], list[Chunk]], str]] = {
    "shape": (lambda: stream(RIGHT[:, :-1]), "a tensor of shape"),
    "dtype": (lambda: stream(RIGHT.bfloat16()), "a tensor of DTYPE_BF16, expected torch.float32"),
    "not finite": (lambda: stream(RIGHT * float("nan")), "a tensor that is not finite"),
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


def test_bf16_travels_as_it_is() -> None:
    values = torch.randn(3, 5, 7).bfloat16()
    first, *rest = pieces(activation_of(bytes(32), 1, 2, values), values, 1)
    assert first.activation.dtype == Activation.DTYPE_BF16
    assert [*first.activation.shape] == [3, 5, 7]
    raw = b"".join(chunk.data for chunk in rest)
    assert raw == values.view(torch.uint8).numpy().tobytes()
