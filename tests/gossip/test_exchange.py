"""What two sites swap: equal means at both, the spread between them, and what a partner must not send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from gossip.cases import PairMember, scene, together
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import CALM, LENGTH, outer_state
from simulation.network import Network, Weather
from simulation.virtual_time import run

from pier_node.base.shared import Vector
from pier_node.config.run import NolocoSection
from pier_node.gossip.exchange import HELD, Lane, Prefetch, Swap, SwapPlan
from pier_node.outer.codec import CODECS, Codec
from pier_node.outer.codec.interface import Plain
from pier_node.outer.state import OuterState
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import BadMessage, Chunk

NAME = b"m" * 32


def vectors(count: int, length: int, seed: int = 1) -> list[Vector]:
    return list(np.random.default_rng(seed).standard_normal((count, length)).astype(np.float32))


def lanes(mine: Sequence[Vector], **more: Any) -> list[Lane]:
    return [Lane(vector, np.full_like(vector, np.nan), **more) for vector in mine]


class Two:
    """The sites a and b in one meeting."""

    def __init__(
        self,
        a: list[Lane],
        b: list[Lane],
        limit: float = 1e6,
        weather: Weather = CALM,
        chunk: int = 5,
        codec: Codec = CODECS["none"],
    ) -> None:
        network = Network(1, weather)
        self.carriers = {node: network.join(node) for node in "ab"}
        self.alive = True
        plan = partial(SwapPlan, 3, NAME, norm_limit=limit, silence=20.0, alive=lambda: self.alive, chunk=chunk)
        self.swaps = {
            node: Swap(self.carriers[node], plan(partner=other), lane, codec)
            for node, other, lane in (("a", "b", a), ("b", "a", b))
        }
        for node, swap in self.swaps.items():
            self.carriers[node].serve_push(taker(swap))

    async def run(self) -> None:
        await asyncio.gather(*(swap.run() for swap in self.swaps.values()))

    async def suspicion(self, node: str) -> Suspicion:
        with pytest.raises(Suspicion) as caught:
            await self.swaps[node].run()
        return caught.value


def taker(swap: Swap) -> Any:
    async def take(sender: str, chunks: AsyncIterator[Chunk]) -> None:
        await swap.take(sender, await anext(chunks), chunks)

    return take


@pytest.mark.parametrize("length", [1, 4, 5, 6, 23])
@pytest.mark.parametrize("tensors", [1, 2])
def test_both_end_with_the_same_means(length: int, tensors: int) -> None:
    mine, theirs = vectors(tensors, length), vectors(tensors, length, seed=2)

    async def main() -> None:
        a, b = lanes(mine), lanes(theirs)
        two = Two(a, b)
        await two.run()
        for number in range(tensors):
            np.testing.assert_array_equal(a[number].mean, b[number].mean)
            np.testing.assert_array_equal(a[number].mean, (mine[number] + theirs[number]) / np.float32(2))
        spreads = [swap.spread for swap in two.swaps.values()]
        expected = np.sqrt(np.mean((mine[0].astype(float) - theirs[0]) ** 2) / 2)
        assert spreads == pytest.approx([expected] * 2, rel=1e-5)
        assert two.swaps["a"].meter.rate() > 0

    run(main())


def test_the_spread_is_an_unbiased_estimate() -> None:
    """Of replicas with standard deviation 0.3 between them."""
    replicas = 0.3 * np.random.default_rng(4).standard_normal((2, 20_000)).astype(np.float32)

    async def main() -> None:
        two = Two(lanes([replicas[0]]), lanes([replicas[1]]), chunk=1000)
        await two.run()
        assert two.swaps["a"].spread == pytest.approx(0.3, rel=0.02)

    run(main())


@given(st.booleans(), st.booleans(), st.integers(1, 12))
def test_an_anchor_that_came_ahead_is_not_sent_again(a_holds: bool, b_holds: bool, length: int) -> None:
    """Each side sends what the other lacks, and both have the same means all the same."""
    mine, theirs = vectors(2, length), vectors(2, length, seed=2)

    async def main() -> None:
        a = [*lanes(mine[:1]), *lanes(mine[1:], held=theirs[1] if a_holds else None, wanted=not b_holds)]
        b = [*lanes(theirs[:1]), *lanes(theirs[1:], held=mine[1] if b_holds else None, wanted=not a_holds)]
        two = Two(a, b)
        await two.run()
        for number in range(2):
            np.testing.assert_array_equal(a[number].mean, b[number].mean)
            np.testing.assert_array_equal(a[number].mean, (mine[number] + theirs[number]) / np.float32(2))
        parts = -(-length // 5)
        assert len(two.swaps["a"]._half_done) == 2 * parts
        assert two.swaps["a"].meter._total == 4 * length * (1 if b_holds else 2)

    run(main())


def test_a_partner_that_falls_silent_is_given_up() -> None:
    async def main() -> None:
        two = Two(lanes(vectors(1, 23)), lanes(vectors(1, 23)))

        async def swallow(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            async for _ in chunks:
                pass

        two.carriers["b"].serve_push(swallow)
        suspicion = await two.suspicion("a")
        assert (suspicion.node, suspicion.reason) == ("b", "nothing moved for 20 s")
        again = Two(lanes(vectors(1, 23)), lanes(vectors(1, 23)))
        again.carriers["b"].serve_push(swallow)
        again.alive = False
        assert (await again.suspicion("a")).reason == "nothing moved for 1 s", "the roster has dropped it"

    run(main())


def test_a_partner_that_is_gone() -> None:
    async def main() -> None:
        two = Two(lanes(vectors(1, 23)), lanes(vectors(1, 23)))
        two.carriers["a"].network.crash("b")
        assert (await two.suspicion("a")).node == "b"

    run(main())


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e5])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_what_is_not_finite_or_too_long_is_refused(value: float) -> None:
    bad = np.full(23, value, np.float32)

    async def main() -> None:
        two = Two(lanes(vectors(1, 23)), lanes([bad]), limit=100.0)
        ends = await asyncio.gather(*(swap.run() for swap in two.swaps.values()), return_exceptions=True)
        assert "norm above 100" in str(ends[0])
        assert isinstance(ends[0], Suspicion)
        assert ends[0].node == "b"
        assert isinstance(ends[1], Suspicion)

    run(main())


def chunk(offset: int, count: int) -> Chunk:
    return Chunk(stage=Chunk.STAGE_SWAP, offset=offset, data=np.ones(count, np.float32).tobytes())


WRONG: dict[str, tuple[list[Chunk], str]] = {
    "out of order": ([chunk(5, 5)], "a chunk at 5, expected 0 to 5"),
    "twice": ([chunk(0, 5), chunk(0, 5)], "a chunk at 0, expected 5 to 10"),
    "too small": ([chunk(0, 4)], "16 bytes for 5 values"),
    "too large": ([chunk(0, 6)], "24 bytes for 5 values"),
    "too few": ([chunk(0, 5)], "ended early"),
    "too many": ([chunk(0, 5), chunk(5, 5), chunk(10, 2), chunk(12, 5)], "a chunk at 12"),
}


@pytest.mark.parametrize("case", WRONG)
def test_exactly_the_chunks_that_are_owed(case: str) -> None:
    chunks, problem = WRONG[case]

    async def stream() -> AsyncIterator[Chunk]:
        for item in chunks:
            yield item

    async def main() -> None:
        swap = Two(lanes(vectors(1, 12)), lanes(vectors(1, 12))).swaps["a"]
        with pytest.raises(BadMessage, match=problem):
            await swap.take("b", Chunk(stage=Chunk.STAGE_SWAP, meeting=NAME), stream())
        assert (await swap._broken).node == "b"

    run(main())


def test_who_may_stream() -> None:
    async def nothing() -> AsyncIterator[Chunk]:
        await asyncio.Event().wait()
        yield Chunk()

    async def main() -> None:
        swap = Two(lanes(vectors(1, 5)), lanes(vectors(1, 5))).swaps["a"]
        first = Chunk(stage=Chunk.STAGE_SWAP, meeting=NAME)
        with pytest.raises(BadMessage, match="c is not our partner"):
            await swap.take("c", first, nothing())
        taking = asyncio.create_task(swap.take("b", first, nothing()))
        await asyncio.sleep(0)
        with pytest.raises(BadMessage, match="a second stream"):
            await swap.take("b", first, nothing())
        taking.cancel()
        with pytest.raises(BadMessage, match="opens with an empty chunk"):
            await Two(lanes(vectors(1, 5)), lanes(vectors(1, 5))).swaps["a"].take("b", chunk(0, 5), nothing())

    run(main())


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_with_a_codec_both_use_what_travelled_and_keep_what_it_dropped(name: str) -> None:
    mine, theirs = vectors(1, 500), vectors(1, 500, seed=2)
    errors = [np.full(500, np.nan, np.float32) for _ in range(2)]

    async def main() -> None:
        a, b = (lanes(its, error=error) for its, error in zip((mine, theirs), errors, strict=True))
        two = Two(a, b, chunk=200, codec=CODECS[name])
        await two.run()
        np.testing.assert_array_equal(a[0].mean, b[0].mean)
        sent = [its[0] - error for its, error in zip((mine, theirs), errors, strict=True)]
        np.testing.assert_allclose(a[0].mean, (sent[0] + sent[1]) / 2, atol=1e-6)
        assert all(np.linalg.norm(error) > 0 for error in errors)

    run(main())


RATES = NolocoSection(gamma=0.3)
DIGEST = b"d" * 32


def test_the_anchor_is_there_before_the_round_and_is_not_sent_again() -> None:
    sent: list[int] = []

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await together(sites)
        await asyncio.sleep(3.0)
        for node, other in ("ab", "ba"):
            held = sites[node].pairs._ahead
            assert held.digest_of(other) == sites[other].pairs.state.digest
            np.testing.assert_array_equal(held.anchor_of(other, held.digest_of(other)), sites[other].pairs.state.anchor)
        push = sites["a"].carrier.push

        async def counting(peer: str, chunks: AsyncIterator[Chunk]) -> None:
            async def counted() -> AsyncIterator[Chunk]:
                async for chunk in chunks:
                    sent.append(len(chunk.data) // 4)
                    yield chunk

            await push(peer, counted())

        sites["a"].carrier.push = counting  # type: ignore[method-assign]
        await together(sites)
        assert sites["a"].pairs.state.members == ("a", "b")

    scene(play, rates=RATES)
    assert sum(sent) == LENGTH, "the weights alone"


def test_what_did_not_arrive_goes_with_the_swap() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await together(sites)  # and the next round at once
        await together(sites)
        for site in sites.values():
            assert (site.pairs.state.round, site.pairs.state.members) == (2, ("a", "b"))

    scene(play, rates=RATES)


def test_nothing_travels_ahead_when_the_weights_are_enough() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await together(sites)
        await asyncio.sleep(3.0)
        assert sites["a"].pairs._ahead.digest_of("b") == b""

    scene(play)


class Holder:
    """What one site holds of others, who it expects to meet, and its state at round 4."""

    def __init__(self, expected: str = "b") -> None:
        self.expected, self.held = expected, outer_state("a", round=4, anchor=[1.0] * LENGTH)
        self.network = Network(1, CALM)
        carrier = self.network.join("a")
        roster = Roster(carrier, lambda: None)  # type: ignore[arg-type, return-value]
        self.ahead = Prefetch(carrier, roster, lambda _: self.expected, self.state, Plain(), 5)

    def state(self) -> OuterState:
        return self.held

    async def take(self, sender: str, anchor: list[float], round: int = 5, digest: bytes = DIGEST) -> None:
        async def chunks() -> AsyncIterator[Chunk]:
            for start in range(0, len(anchor), 5):
                part = np.array(anchor[start : start + 5], np.float32)
                yield Chunk(stage=Chunk.STAGE_ANCHOR, offset=start, data=part.tobytes())

        await self.ahead.take(sender, Chunk(round=round, meeting=digest, stage=Chunk.STAGE_ANCHOR), chunks())


def holding(expected: str = "b") -> Holder:
    return Holder(expected)


def test_only_who_is_expected_may_send() -> None:
    async def main() -> None:
        holder = holding()
        with pytest.raises(BadMessage, match="do not expect to meet in round 5"):
            await holder.take("c", [1.0] * LENGTH)
        with pytest.raises(BadMessage, match="do not expect to meet in round 4"):
            await holder.take("b", [1.0] * LENGTH, round=4)
        await holder.take("b", [2.0] * LENGTH)
        assert holder.ahead.digest_of("b") == DIGEST
        assert holder.ahead.anchor_of("b", b"x" * 32) is None, "of another state"

    run(main())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize(
    ("anchor", "problem"),
    [
        ([1.0] * (LENGTH - 1), "4 bytes for 2 values"),
        ([1.0] * 10, "ended early"),
        ([1.0] * 17, "20 bytes for 2 values"),
        ([np.nan] * LENGTH, "not finite"),
        ([1e30] * LENGTH, "too long"),
    ],
)
def test_what_is_not_an_anchor_is_not_kept(anchor: list[float], problem: str) -> None:
    async def main() -> None:
        holder = holding()
        with pytest.raises(BadMessage, match=problem):
            await holder.take("b", anchor)
        assert holder.ahead.digest_of("b") == b""

    run(main())


def test_one_anchor_at_a_time_and_of_no_distant_round() -> None:
    async def never() -> AsyncIterator[Chunk]:
        yield await asyncio.Event().wait() and Chunk()

    async def main() -> None:
        holder = holding()
        with pytest.raises(BadMessage, match="do not expect to meet in round 7"):
            await holder.take("b", [1.0] * LENGTH, round=7)
        opening = Chunk(round=6, meeting=DIGEST, stage=Chunk.STAGE_ANCHOR)
        stalled = asyncio.create_task(holder.ahead.take("b", opening, never()))
        await asyncio.sleep(1.0)
        with pytest.raises(BadMessage, match="another anchor of yours is arriving"):
            await holder.take("b", [1.0] * LENGTH)
        with pytest.raises(BadMessage, match="nothing of an anchor came for 60 s"):
            await stalled
        await holder.take("b", [1.0] * LENGTH)
        assert holder.ahead.digest_of("b") == DIGEST

    run(main())


def test_no_more_than_a_few_are_kept() -> None:
    async def main() -> None:
        holder = holding()
        for number, node in enumerate(("b", "c", "d")):
            holder.expected = node
            await holder.take(node, [float(number)] * LENGTH)
        assert len(holder.ahead._held) == HELD
        assert holder.ahead.digest_of("b") == b""
        anchor = holder.ahead.anchor_of("d", DIGEST)
        assert anchor is not None
        assert anchor[0] == 2.0

    run(main())


def test_another_partner_gets_it_when_it_becomes_another() -> None:
    async def main() -> None:
        holder, got = holding(""), list[str]()
        for node in "bc":
            carrier = holder.network.join(node)

            async def take(sender: str, chunks: AsyncIterator[Chunk], node: str = node) -> None:
                async for chunk in chunks:
                    got.append(f"{node}{len(chunk.data)}")

            carrier.serve_push(take)
        holder.ahead.begin(5)
        await asyncio.sleep(1.0)
        assert not got, "nobody is expected yet"
        for holder.expected in ("b", "c"):
            holder.ahead._roster.changed.notify()
            await asyncio.sleep(1.0)
        assert got == ["b0", "b20", "b20", "b8", "c0", "c20", "c20", "c8"]
        await holder.ahead.end()
        assert holder.ahead._sending is None

    run(main())
