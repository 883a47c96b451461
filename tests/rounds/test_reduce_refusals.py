"""What a member of an attempt refuses, and whom it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from rounds.cases import CALM, LONG, fp32
from rounds.exchanges import BALLOT, SILENCE, Exchange, vectors
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.base.shared import Vector
from pier_node.outer.codec import codec
from pier_node.outer.mean import Update
from pier_node.rounds.exchange_plan import Plan
from pier_node.rounds.reduce import Reduction
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import BadMessage, Chunk
from pier_proto.v1.peer_pb2 import Share


def scatter(*pieces: tuple[int, Vector]) -> list[Chunk]:
    """A stream of b's update, which opens with the chunk that names it."""
    opening = Chunk(round=5, ballot=BALLOT, stage=Chunk.STAGE_SCATTER)
    return [opening, *(Chunk(offset=offset, data=data.tobytes()) for offset, data in pieces)]


ZERO = fp32(0, 0)
GOOD = [(0, ZERO), (2, ZERO)]


async def taken_by_a(
    chunks: Sequence[Chunk], sender: str = "b", limit: float = 1e6, name: str = "none"
) -> tuple[str, Suspicion]:
    """What a tells the sender of a stream (b owes it elements 0..4), and whom it suspects then."""
    dealt = [
        Share(node="a", tokens=1, norm=LONG, offset=0, length=4),
        Share(node="b", tokens=1, norm=LONG, offset=4, length=2),
    ]
    network = Network(1, CALM)
    carrier = network.join("a")
    network.join("b").serve_push(_swallow)
    mean = np.zeros(6, np.float32)
    plan, mine = Plan(5, BALLOT, dealt, limit, SILENCE, 2), Update(np.zeros(6, np.float32), 1)
    part = Reduction(carrier, plan, mine, mean, codec(name))
    task = carrier.spawn(part.run())
    taking = carrier.spawn(part.take(sender, chunks[0], _stream(chunks[1:])))
    await asyncio.wait([task])
    taking.cancel()
    ends = await asyncio.gather(taking, task, return_exceptions=True)
    assert isinstance(ends[1], Suspicion)
    return str(ends[0]), ends[1]


async def _swallow(sender: str, chunks: AsyncIterator[Chunk]) -> None:
    async for _ in chunks:
        pass


async def _stream(chunks: Sequence[Chunk]) -> AsyncIterator[Chunk]:
    for chunk in chunks:
        await asyncio.sleep(0.01)
        yield chunk


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([(0, ZERO), (0, ZERO)], "chunk at 0 of 8 bytes, expected 2..4"),
        ([(2, ZERO), (0, ZERO)], "chunk at 2 of 8 bytes, expected 0..2"),
        ([(0, ZERO)], "ended early"),
        ([], "ended early"),
        ([(0, fp32(0))], "chunk at 0: none: 4 bytes for 2 values"),
        ([(0, fp32(0, 0, 0, 0))], "chunk at 0: none: 16 bytes for 2 values"),
        ([*GOOD, (4, ZERO)], "chunk at 4 of 8 bytes, expected 0..0"),
        ([*GOOD, (0, fp32())], "chunk at 0 of 0 bytes"),
    ],
)
def test_a_stream_that_is_not_exactly_what_is_owed(pieces: list[tuple[int, Vector]], complaint: str) -> None:
    answer, suspicion = run(taken_by_a(scatter(*pieces)))
    assert complaint in answer, "the sender is told"
    assert complaint in suspicion.reason
    assert suspicion.node == "b"


def test_a_stream_that_does_not_open_with_its_name() -> None:
    answer, suspicion = run(taken_by_a([Chunk(stage=Chunk.STAGE_SCATTER, data=b"0000"), *scatter(*GOOD)]))
    assert "opens with an empty chunk" in answer
    assert suspicion.node == "b"


def test_strangers_are_refused_and_change_nothing() -> None:
    answer, suspicion = run(taken_by_a(scatter(*GOOD), sender="z"))
    assert answer == "z is not a member of this attempt"
    assert suspicion.node == "b", "it is still waited for"


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("values", [[np.nan, 0], [np.inf, 0], [3e38, 3e38], [8, 8]])
def test_an_update_that_is_not_finite_or_too_long_is_refused_by_name(values: list[float]) -> None:
    _, suspicion = run(taken_by_a(scatter((0, fp32(*values)), (2, ZERO)), limit=10.0))
    assert suspicion.node == "b"
    assert "not finite, or its norm is above 10" in suspicion.reason


def test_the_norm_is_that_of_all_chunks_together() -> None:
    _, suspicion = run(taken_by_a(scatter((0, fp32(5, 5)), (2, fp32(5, 6))), limit=10.0))
    assert "norm" in suspicion.reason


def test_a_second_stream_is_refused() -> None:
    async def main() -> None:
        exchange = Exchange(vectors("ab", 4))
        part, opening = exchange.parts["a"], scatter()[0]
        for complaint in ("ended early", "a second stream"):
            with pytest.raises(BadMessage, match=complaint):
                await part.take("b", opening, _stream([]))

    run(main())


def test_a_stream_of_an_attempt_that_is_over_writes_nothing() -> None:
    async def main() -> None:
        exchange = Exchange(vectors("ab", 4))
        part = exchange.parts["a"]
        task = asyncio.create_task(part.run())
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        exchange.means["a"].fill(7)
        late = Chunk(round=5, ballot=BALLOT, stage=Chunk.STAGE_GATHER)
        with pytest.raises(BadMessage, match="over"):
            await part.take("b", late, _stream([Chunk(offset=2, data=ZERO.tobytes())]))
        assert exchange.means["a"].tolist() == [7] * 4, "that memory may belong to the next attempt"

    run(main())


def test_a_stream_that_waits_for_room_ends_with_its_attempt() -> None:
    async def main() -> None:
        exchange = Exchange(vectors("abc", 60))
        part = exchange.parts["a"]
        task = asyncio.create_task(part.run())
        owed = scatter(*((start, ZERO) for start in range(0, 20, 2)))
        taking = asyncio.create_task(part.take("b", owed[0], _stream(owed[1:])))
        await asyncio.sleep(1.0)
        assert not taking.done(), "c has sent nothing yet"
        task.cancel()
        with pytest.raises(BadMessage, match="over"):
            await asyncio.wait_for(taking, 1.0)

    run(main())


@pytest.mark.parametrize("codes", [0, 1, 3])
def test_as_many_sparse_codes_as_members_are_owed(codes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members, of which b owes the mean of its shard as the codes of both."""
    monkeypatch.setattr("pier_node.rounds.reduce.of_means", lambda *_: None)
    opening = Chunk(round=5, ballot=BALLOT, stage=Chunk.STAGE_GATHER)
    one = bytes(codec("topk").encode(fp32(1, 2)))
    told, suspicion = run(taken_by_a([opening, Chunk(offset=4, data=one * codes)], name="topk"))
    assert f"{codes * len(one)} bytes for 2 codes of 2 values" in told
    assert suspicion.node == "b"
