from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds.cases import ballot, fp32
from rounds.exchanges import SILENCE, Exchange, vectors
from simulation.network import Network, Weather
from simulation.virtual_time import run

from pier_node.base.faults import Faults
from pier_node.base.shared import Vector
from pier_node.outer.codec import CODECS, codec, of_means
from pier_node.outer.codec.blockwise import Int4
from pier_node.outer.mean import trimmed_mean, weighted_mean
from pier_node.rounds.exchange_plan import Plan, fitting, rows
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.carrier import BadMessage, Chunk
from pier_proto.v1.peer_pb2 import Share


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


@given(st.integers(1, 5), st.integers(1, 900), st.sampled_from(["topk", "topk2"]), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_of_a_mean_of_sparse_codes_nothing_is_dropped(
    count: int, length: int, name: str, trimmed: bool, seed: int
) -> None:
    """Unless the codes of all are longer than the mean as int8; and all members have the same bits in any case."""
    dice, names, used = random.Random(seed), "abcde"[:count], codec(name)
    given, rule = vectors(names, length, seed), trimmed_mean if trimmed else weighted_mean
    tokens = {node: dice.choice([0, 1, 7]) for node in names} | {dice.choice(names): 3}
    norms = {"a": 1e3} if dice.random() < 0.5 else {}  # so a's update is clipped, if there are others

    async def main() -> None:
        exchange = Exchange(
            given,
            tokens,
            None,
            dice.choice([1, 50, 64, 300]),
            codec=name,
            rule="trimmed" if trimmed else "none",
            norms=norms,
        )
        await exchange.run()
        first, *others = exchange.means.values()
        assert all(mean.tobytes() == first.tobytes() for mean in others)
        plan, givers = exchange.plan, [node for node in names if tokens[node]]
        for start, end in (each for share in plan.shares for each in plan.ranges(share)):
            if of_means(used, len(givers), end - start):
                continue
            sent = {node: used.decode(used.encode(given[node][start:end]), end - start) for node in givers}
            clipped = [part * np.float32(plan.clips.get(node, 1)) for node, part in sent.items()]
            expected = np.empty(end - start, np.float32)
            rule(clipped, [*plan.weights.values()], expected)
            np.testing.assert_array_equal(first[start:end], expected)
            for node in givers:
                np.testing.assert_array_equal(exchange.errors[node][start:end], given[node][start:end] - sent[node])

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


def test_a_member_that_never_acknowledges_what_it_was_sent_is_named() -> None:
    """c takes and sends everything, but leaves the streams of the others open."""

    async def main() -> tuple[Suspicion | None, float]:
        exchange = Exchange(vectors("ac", 12))
        part = exchange.parts["c"]

        async def hold(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            await part.take(sender, await anext(chunks), chunks)
            await asyncio.Event().wait()

        exchange.carriers["c"].serve_push(hold)
        return await exchange.outcome("a"), asyncio.get_running_loop().time()

    suspicion, seconds = run(main())
    assert suspicion
    assert (suspicion.node, suspicion.reason) == ("c", "took nothing of what we sent for 60 s")
    assert 2 * SILENCE <= seconds < 2 * SILENCE + 1


def test_a_slow_member_is_waited_for_as_long_as_it_says_something() -> None:
    """c is stopped before each of its chunks for almost as long as others put up with."""

    async def main() -> float:
        exchange = Exchange(vectors("abc", 12))

        async def dawdle(round: int, phase: str) -> None:
            await asyncio.sleep(0.9 * SILENCE)

        exchange.parts["c"].faults = Faults(dawdle)
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
            deepest = max(deepest, exchange.parts["a"]._first._senders["b"].qsize())

        exchange.parts["a"].faults = Faults(look)
        await exchange.run()
        return deepest

    assert 1 <= run(main()) <= 4


class Meeting(Int4):
    """Codes nothing before a second thread is at it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = itertools.count(1)
        self._met = threading.Event()

    def encode(self, values: Vector) -> bytes:
        if next(self._calls) == 2:
            self._met.set()
        assert self._met.wait(20)
        return super().encode(values)


async def test_several_chunks_are_coded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "int4", Meeting())
    given = vectors("a", 8 * 64)
    exchange = Exchange(given, chunk=64, codec="int4")
    await exchange.run()
    np.testing.assert_array_equal(exchange.errors["a"], given["a"] - exchange.means["a"])


def test_chunks_that_are_here_already_do_not_hold_the_loop() -> None:
    """While a takes b's mean of 100 chunks, others have a turn between any two."""

    async def main() -> int:
        exchange, turns = Exchange(vectors("ab", 400)), 0

        async def burst() -> AsyncIterator[Chunk]:
            for start, end in exchange.plan.ranges(exchange.plan.shares[1]):
                yield Chunk(offset=start, data=bytes(4 * (end - start)))

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        await exchange.parts["a"].take("b", exchange.plan.message(Chunk.STAGE_GATHER, 200, b""), burst())
        counting.cancel()
        return turns

    assert run(main()) >= 99


SHARES = [
    Share(node="a", tokens=10, norm=2.0, offset=0, length=5),
    Share(node="b", tokens=0, norm=0.0, offset=5, length=0),
    Share(node="c", tokens=20, norm=2.0, offset=5, length=4),
    Share(node="d", tokens=5, norm=60.0, offset=9, length=1),
]
PLAN = Plan(7, ballot(3), SHARES, norm_limit=50.0, silence=1.0, chunk=2)


def test_a_shard_is_cut_into_chunks() -> None:
    assert PLAN.ranges(SHARES[0]) == [(0, 2), (2, 4), (4, 5)]
    assert PLAN.ranges(SHARES[1]) == []


def test_a_chunk_names_its_attempt() -> None:
    chunk = PLAN.message(Chunk.STAGE_GATHER, 5, b"data")
    assert (chunk.round, chunk.ballot, chunk.stage, chunk.offset, chunk.data) == (7, ballot(3), 2, 5, b"data")


def test_whoever_has_no_tokens_gives_nothing() -> None:
    assert PLAN.weights == {"a": 0.5, "c": 1.0, "d": 0.25}


def test_what_anyone_may_send() -> None:
    assert PLAN.clips == {"d": pytest.approx(0.1)}
    assert PLAN.one_level(lossy=False).longest["a"] == pytest.approx(2.02)
    assert PLAN.one_level(lossy=True).longest["a"] == pytest.approx(4.0)
    assert PLAN.one_level(lossy=False).longest["d"] == 50.0
    assert PLAN.one_level(lossy=False).longest_mean == pytest.approx(3 * 2.0 * 2 * 3**0.5 * 1.01), (
        "c has twice the usual tokens"
    )


# --- two levels ------------------------------------------------------------------------------


def test_a_round_of_more_than_32_owners_is_a_grid() -> None:
    """35 owners in 7 rows of 5, and two members that own nothing, one in each of the first rows."""
    names = [f"{number:02d}" for number in range(37)]
    shares = [Share(node=it, offset=0, length=0 if it in ("03", "20") else 1) for it in names]
    grid = rows(shares)
    assert [len(row.owners) for row in grid] == [5] * 7
    assert grid[0].nodes == ["00", "01", "02", "03", "04", "05"]
    assert [row.others for row in grid] == [["03"], ["20"], [], [], [], [], []]
    assert sorted(node for row in grid for node in row.nodes) == names
    assert rows(shares[:34]) == [], "32 owners"


def test_a_member_of_a_grid_sends_the_chunks_of_a_column_s_shards_in_turn() -> None:
    """So that each owner of the column soon has something to average, however long the exchange takes."""
    shares = [Share(node=f"{it:02d}", tokens=1, norm=1.0, offset=4 * it, length=4) for it in range(35)]
    levels = Plan(7, ballot(3), shares, norm_limit=50.0, silence=1.0, chunk=2).two_levels("07", lossy=False)
    assert levels
    row, column = levels
    assert row.nodes == ["05", "06", "07", "08", "09"]
    firsts = [4 * it for it in range(1, 35, 5)]
    assert [start for start, _ in row.chunks["06"]] == [*firsts, *(start + 2 for start in firsts)]
    assert column
    assert column.nodes == tuple(f"{it:02d}" for it in range(2, 35, 5))
    assert column.chunks["02"] == [(8, 10), (10, 12)]
    assert set(column.weights.values()) == {5.0}


@given(st.integers(0, 1024))
def test_a_grid_is_full_and_has_almost_all_owners(owners: int) -> None:
    left = fitting(owners)
    assert owners - left < max(1, math.isqrt(owners))
    assert (left <= 34) == (not rows([Share(length=1)] * left))


@given(st.integers(35, 45), st.sampled_from(["none", "int8", "int4"]), st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_two_levels_make_the_mean_of_all_and_the_same_bits_at_all(count: int, name: str, seed: int) -> None:
    """And what a codec drops of an update, of a row's mean or of the mean, somebody with weight sends again."""
    dice, names, lossy = random.Random(seed), [f"{number:02d}" for number in range(count)], name != "none"
    given = vectors(names, dice.choice([count, 300, 2000]), seed)
    tokens = {node: dice.choice([1, 1, 7] if lossy else [0, 1, 1, 7]) for node in names} | {dice.choice(names): 3}
    if not lossy:
        given[dice.choice(names)] *= 40  # so it is clipped

    async def main() -> None:
        weather = Weather(delay=dice.choice([0.001, 1.0]), jitter=dice.choice([0.0, 3.0]))
        network = Network(seed, weather)
        exchange = Exchange(given, tokens, None, dice.randint(1, 64), network, codec=name, norms={})
        assert rows(exchange.plan.shares)
        await exchange.run()
        first, *others = exchange.means.values()
        assert all(mean.tobytes() == first.tobytes() for mean in others)
        clips, weights = exchange.plan.clips, exchange.plan.weights
        dropped = exchange.errors if lossy else dict.fromkeys(names, np.zeros_like(first))
        sent = [weight * (clips.get(node, 1.0) * given[node] - dropped[node]) for node, weight in weights.items()]
        np.testing.assert_allclose(first, np.sum(sent, axis=0) / sum(weights.values()), atol=1e-4)

    run(main())


@pytest.mark.parametrize("silent", ["07", "36"])
def test_one_that_is_silent_in_a_grid_is_named_by_its_row(silent: str) -> None:
    """Whether it owns a shard (07) or not (36), nobody has a mean before it has taken part."""

    async def main() -> list[BaseException | None]:
        names = [f"{number:02d}" for number in range(37)]
        tokens = dict.fromkeys(names, 1) | {silent: 0}
        exchange = Exchange(vectors(names, 74), tokens)
        exchange.parts.pop(silent)

        async def hold(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            await asyncio.Event().wait()

        exchange.carriers[silent].serve_push(hold)
        ends = await asyncio.gather(*(part.run() for part in exchange.parts.values()), return_exceptions=True)
        assert not any(part.complete.is_set() for part in exchange.parts.values())
        return ends

    ends = run(main())
    found = Counter((end.node, end.reason) for end in ends if isinstance(end, Suspicion))
    assert found[silent, "sent nothing for 30 s"] >= 5, "its row, before others lose patience"
