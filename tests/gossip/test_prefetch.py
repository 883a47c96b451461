"""Anchors that travel while the workers train, with γ ≠ β."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from gossip.cases import PairMember, scene
from rounds.cases import CALM, LENGTH, outer_state
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.config.run import NolocoSection
from pier_node.gossip.prefetch import HELD, Prefetch
from pier_node.outer.codec.plain import Plain
from pier_node.outer.state import OuterState
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import BadMessage
from pier_node.wire.chunk import Chunk

RATES = NolocoSection(gamma=0.3)
DIGEST = b"d" * 32


async def both(sites: dict[str, PairMember]) -> None:
    await asyncio.gather(sites["a"].bring(0.1), sites["b"].bring(0.3))


def test_the_anchor_is_there_before_the_round_and_is_not_sent_again() -> None:
    sent: list[int] = []

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await both(sites)
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
        await both(sites)
        assert sites["a"].pairs.state.members == ("a", "b")

    scene(play, rates=RATES)
    assert sum(sent) == LENGTH, "the weights alone"


def test_what_did_not_arrive_goes_with_the_swap() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await both(sites)  # and the next round at once
        await both(sites)
        for site in sites.values():
            assert (site.pairs.state.round, site.pairs.state.members) == (2, ("a", "b"))

    scene(play, rates=RATES)


def test_nothing_travels_ahead_when_the_weights_are_enough() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await both(sites)
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
