from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outer.cases import CALM, ballot, fp32, shares
from simulation.network import Network, Weather
from simulation.virtual_time import run

from pier.v1.peer_pb2 import Chunk, Share
from pier_node.faults import Faults
from pier_node.outer.reduce import NOBODY, Plan, Reduction, Suspicion
from pier_node.outer.shards import split
from pier_node.shared import Vector
from pier_node.wire.carrier import BadMessage

BALLOT = ballot(1)
SILENCE = 30.0


class Exchange:
    """An attempt of some members, each with its own vector."""

    def __init__(
        self,
        vectors: dict[str, Vector],
        tokens: dict[str, int] | None = None,
        bandwidths: Sequence[float] | None = None,
        chunk: int = 2,
        network: Network | None = None,
        limit: float = 1e6,
    ) -> None:
        length = len(next(iter(vectors.values())))
        dealt = shares(tokens or dict.fromkeys(vectors, 1), split(length, bandwidths or [1.0] * len(vectors)))
        self.network = network or Network(1, CALM)
        self.carriers = {node: self.network.join(node) for node in vectors}
        self.means = {node: np.full(length, np.nan, np.float32) for node in vectors}
        plan = Plan(5, BALLOT, dealt, norm_limit=limit, silence=SILENCE, chunk=chunk)
        self.parts = {
            node: Reduction(self.carriers[node], plan, vectors[node], self.means[node]) for node in sorted(vectors)
        }
        for node, part in self.parts.items():
            self.carriers[node].serve_push(self._taker(part))

    def _taker(self, part: Reduction) -> Callable[[str, AsyncIterator[Chunk]], Any]:
        async def take(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            await part.take(sender, await anext(chunks), chunks)

        return take

    async def run(self) -> None:
        await asyncio.gather(*(part.run() for part in self.parts.values()))

    async def outcome(self, node: str) -> Suspicion | None:
        """What became of one member's part while all took theirs."""
        ends = await asyncio.gather(*(part.run() for part in self.parts.values()), return_exceptions=True)
        end = dict(zip(self.parts, ends, strict=True))[node]
        assert end is None or isinstance(end, Suspicion)
        return end


def vectors(names: str, length: int, seed: int = 1) -> dict[str, Vector]:
    dice = np.random.default_rng(seed)
    return {node: dice.standard_normal(length).astype(np.float32) for node in names}


def mean_in_id_order(given: dict[str, Vector], tokens: dict[str, int]) -> Vector:
    largest = max(tokens.values())
    total, weight = np.zeros_like(next(iter(given.values()))), np.float32(0)
    for node in sorted(given):
        if tokens[node]:
            share = np.float32(tokens[node] / largest)
            total = given[node] * share if not weight else total + given[node] * share
            weight += share
    return total / weight


@given(st.integers(2, 5), st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=40)
def test_all_end_with_the_same_bits_however_it_is_cut_and_in_whatever_order_it_comes(
    count: int, length: int, seed: int
) -> None:
    dice, names = random.Random(seed), "abcde"[:count]
    given = vectors(names, length, seed)
    tokens = {node: dice.choice([0, 1, 1, 7, 1000]) for node in names}
    tokens[dice.choice(names)] = 3
    expected = mean_in_id_order(given, tokens)

    async def main() -> None:
        weather = Weather(delay=dice.choice([0.001, 1.0]), jitter=dice.choice([0.0, 3.0]))
        bandwidths = [dice.choice([0.0, 1.0, 5.0, 1e9]) for _ in names]
        exchange = Exchange(given, tokens, bandwidths, dice.randint(1, 9), Network(seed, weather))
        await exchange.run()
        for mean in exchange.means.values():
            assert mean.tobytes() == expected.tobytes()

    run(main())


def test_whoever_trained_on_nothing_changes_nothing() -> None:
    given = {"a": fp32(1, 2, 3, 4), "b": fp32(*[np.nan] * 4), "c": fp32(3, 2, 1, 0)}

    async def main() -> None:
        exchange = Exchange(given, {"a": 5, "b": 0, "c": 5})
        await exchange.run()
        assert all(mean.tolist() == [2, 2, 2, 2] for mean in exchange.means.values())

    run(main())


def test_nobody_trained() -> None:
    async def main() -> None:
        exchange = Exchange(vectors("abc", 6), dict.fromkeys("abc", 0))
        await exchange.run()
        assert not any(mean.any() for mean in exchange.means.values())

    run(main())


def test_a_member_alone() -> None:
    async def main() -> None:
        exchange = Exchange({"a": fp32(1, 2, 3)})
        await exchange.run()
        assert exchange.means["a"].tolist() == [1, 2, 3]

    run(main())


def test_every_member_takes_part_even_if_it_has_nothing_to_send() -> None:
    """The barrier before a result is adopted: who is not there is noticed."""

    async def main(present: str) -> Suspicion | None:
        exchange = Exchange(vectors("abc", 0), dict.fromkeys("abc", 0))
        for node in set("abc") - set(present):
            exchange.network.crash(node)
            del exchange.parts[node]
        return await exchange.outcome("a")

    assert run(main("abc")) is None
    suspicion = run(main("ab"))
    assert suspicion
    assert suspicion.node == "c"


# --- what a member refuses ----------------------------------------------------------------------


def scatter(*pieces: tuple[int, Vector]) -> list[Chunk]:
    """A stream of b's contribution, which opens with the chunk that names it."""
    opening = Chunk(round=5, ballot=BALLOT, stage=Chunk.STAGE_SCATTER)
    return [opening, *(Chunk(offset=offset, data=data.tobytes()) for offset, data in pieces)]


ZERO = fp32(0, 0)
GOOD = [(0, ZERO), (2, ZERO)]


async def taken_by_a(chunks: Sequence[Chunk], sender: str = "b", limit: float = 1e6) -> tuple[str, Suspicion]:
    """What a tells the sender of a stream (b owes it elements 0..4), and whom it suspects then."""
    dealt = [
        Share(node="a", tokens=1, offset=0, length=4),
        Share(node="b", tokens=1, offset=4, length=2),
    ]
    network = Network(1, CALM)
    carrier = network.join("a")
    network.join("b").serve_push(_swallow)
    mean = np.zeros(6, np.float32)
    part = Reduction(carrier, Plan(5, BALLOT, dealt, limit, SILENCE, 2), np.zeros(6, np.float32), mean)
    task = carrier.spawn(part.run())
    taking = carrier.spawn(part.take(sender, chunks[0], _stream(chunks[1:])))
    await asyncio.wait([task])
    taking.cancel()
    answer, end = await asyncio.gather(taking, task, return_exceptions=True)
    assert isinstance(end, Suspicion)
    return str(answer), end


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
        ([(0, fp32(0))], "of 4 bytes, expected 0..2"),
        ([(0, fp32(0, 0, 0, 0))], "of 16 bytes, expected 0..2"),
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


# --- who is lost -----------------------------------------------------------------------------


def test_a_dead_member_is_noticed_at_once() -> None:
    async def main() -> tuple[Suspicion | None, float]:
        exchange = Exchange(vectors("abc", 12))
        exchange.network.crash("c")
        del exchange.parts["c"]
        return await exchange.outcome("a"), asyncio.get_running_loop().time()

    suspicion, seconds = run(main())
    assert suspicion
    assert suspicion.node == "c"
    assert seconds < 1


@pytest.mark.parametrize("weather", [Weather(0.01, 0.0, cut_stream=0.3), Weather(0.01, 0.0, loss=0.3)])
def test_a_cut_stream_ends_the_attempt_with_a_name(weather: Weather) -> None:
    async def main(seed: int) -> Suspicion | None:
        return await Exchange(vectors("abc", 12), network=Network(seed, weather)).outcome("a")

    outcomes = [run(main(seed)) for seed in range(12)]
    assert {suspicion.node for suspicion in outcomes if suspicion} <= {"b", "c", NOBODY}
    assert sum(suspicion is not None and suspicion.node != NOBODY for suspicion in outcomes) >= 6


def test_a_member_that_falls_silent_is_named_after_the_silence() -> None:
    async def main() -> tuple[Suspicion | None, float]:
        exchange = Exchange(vectors("abc", 12))
        silent = exchange.parts.pop("c")

        async def hold(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            await asyncio.Event().wait()

        exchange.carriers["c"].serve_push(hold)
        assert silent
        return await exchange.outcome("a"), asyncio.get_running_loop().time()

    suspicion, seconds = run(main())
    assert suspicion
    assert (suspicion.node, suspicion.reason) == ("c", "sent nothing for 30 s")
    assert SILENCE <= seconds < SILENCE + 1


def test_a_slow_member_is_waited_for_as_long_as_it_says_something() -> None:
    """c is stopped before each of its chunks for almost as long as others put up with."""

    async def main() -> float:
        exchange = Exchange(vectors("abc", 12))

        async def dawdle(round: int, phase: str) -> None:
            await asyncio.sleep(0.9 * SILENCE)

        exchange.parts["c"]._faults = Faults(dawdle)
        await exchange.run()
        return exchange.parts["a"].longest_wait

    assert run(main()) < SILENCE


def test_a_refusal_is_only_the_echo_of_what_went_wrong_elsewhere() -> None:
    """b refuses a's stream because c broke b's attempt: a must not hold it against b."""

    async def main() -> Suspicion | None:
        exchange = Exchange(vectors("ab", 8))

        async def refuse(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            raise BadMessage("that attempt is over")

        exchange.carriers["b"].serve_push(refuse)
        return await exchange.outcome("a")

    suspicion = run(main())
    assert suspicion
    assert (suspicion.node, suspicion.reason) == (NOBODY, "b refused what we sent: that attempt is over")


def test_a_slow_owner_holds_its_senders_back() -> None:
    """Whatever the length of the vector, few chunks of a sender wait in the owner's memory."""

    async def main() -> int:
        exchange = Exchange(vectors("ab", 400), bandwidths=[1.0, 1.0], chunk=2)
        deepest = 0

        async def look(round: int, phase: str) -> None:
            nonlocal deepest
            await asyncio.sleep(5.0)
            deepest = max(deepest, exchange.parts["a"]._senders["b"].qsize())

        exchange.parts["a"]._faults = Faults(look)
        await exchange.run()
        return deepest

    assert 1 <= run(main()) <= 4
