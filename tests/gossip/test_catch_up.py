"""The state that a site of pairs continues from: the median of three, so that one that lies moves it nowhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from gossip.cases import PairMember, acquainted
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import CALM, LENGTH, outer_state, shared
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.gossip.catch_up import CatchUpInPairs, median
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.wire.states import StateServer


def at(level: float, node: str, round: int, **ledger: int) -> OuterState:
    return outer_state([node], round=round, anchor=[level] * LENGTH, **ledger)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    st.permutations(range(3)),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_the_median_lies_in_the_middle_whatever_the_order(
    levels: list[float], order: list[int], rounds: list[int]
) -> None:
    states = [at(levels[place], "abc"[place], rounds[place], x=rounds[place]) for place in order]
    made = median("me", states)
    assert made.anchor.tolist() == [np.float32(sorted(levels)[1])] * LENGTH
    assert (made.round, made.members) == (sorted(rounds)[1], ("me",))
    assert made.ledger == {"x": sorted(rounds)[1]}


class Scene:
    """A site that catches up from others which have these states."""

    def __init__(self, network: Network, own: OuterState | None, founder: str = "", **states: OuterState) -> None:
        self.members = {node: PairMember(network, node, state, founder=founder) for node, state in states.items()}
        self.me = PairMember(network, "me", own, founder=founder)
        for member in self.members.values():
            pairs = member.pairs
            StateServer(member.carrier, lambda number, shadow, pairs=pairs: pairs.offer(number, shadow))  # type: ignore[misc]
            member.meet("me", *self.members)
        self.me.meet(*self.members)
        self.own = own
        self.catch_up = CatchUpInPairs(self.me.carrier, self.me.tools.standing, LENGTH)

    async def state(self, *nodes: str) -> OuterState:
        await acquainted({**self.members, "me": self.me})
        asked = [*(nodes or self.members)]
        async with asyncio.timeout(600):
            fetched = await self.catch_up.state(lambda: asked, self.own)
        assert fetched
        return fetched


def test_a_liar_among_three_moves_nothing() -> None:
    async def main() -> None:
        liar = at(1e9, "b", 5000, me=10**9)
        scene = Scene(Network(1, CALM), None, a=at(1.0, "a", 20, me=7), b=liar, c=at(2.0, "c", 21, me=8))
        state = await scene.state()
        assert state.anchor.tolist() == [2.0] * LENGTH
        assert (state.round, state.ledger) == (21, {"me": 8})

    run(main())


def test_a_site_that_has_a_state_is_the_third() -> None:
    async def main() -> None:
        own = at(0.0, "me", 3, me=30)
        scene = Scene(Network(1, CALM), own, a=at(5.0, "a", 20, me=7), b=at(1.0, "b", 21, me=9))
        state = await scene.state()
        assert state.anchor.tolist() == [1.0] * LENGTH
        assert (state.round, state.ledger) == (20, {"me": 9}), "of its own steps, those that others have too"

    run(main())


def test_two_with_the_same_bits_need_no_third() -> None:
    async def main() -> None:
        merged = at(4.0, "a", 20)
        scene = Scene(Network(1, CALM), None, a=merged, b=merged, c=at(9.0, "c", 20))
        assert (await scene.state("a", "b", "c")).digest == merged.digest

    run(main())


def test_with_one_other_only_its_state_is_taken_within_a_bound_of_ones_own() -> None:
    async def main() -> None:
        own, theirs = at(1.0, "me", 3), at(3.0, "a", 20)
        assert (await Scene(Network(1, CALM), own, a=theirs).state()).digest == theirs.digest
        far = Scene(Network(1, CALM), own, a=at(1e6, "a", 20))
        with pytest.raises(TimeoutError):
            await far.state()

    run(main())


def test_those_that_cannot_give_theirs_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = Network(1, CALM)
        scene = Scene(network, None, a=at(1.0, "a", 20), b=at(2.0, "b", 20), c=at(3.0, "c", 20), d=at(4.0, "d", 20))
        scene.members["a"].pairs.state = replace(scene.members["a"].pairs.state, round=30)  # not on its disk yet
        assert (await scene.state("a", "b", "c", "d")).anchor.tolist() == [3.0] * LENGTH

    run(main())


def test_a_state_with_vectors_that_no_pair_has_is_passed_over() -> None:
    async def main() -> None:
        liar = at(9.0, "a", 20)
        liar = replace(liar, tensors={**liar.tensors, ADAM_M: shared([0.0] * LENGTH), ADAM_V: shared([0.0] * LENGTH)})
        scene = Scene(Network(1, CALM), None, a=liar, b=at(1.0, "b", 20), c=at(2.0, "c", 20), d=at(3.0, "d", 20))
        state = await scene.state("a", "b", "c", "d")
        assert (state.anchor.tolist(), {*state.tensors}) == ([2.0] * LENGTH, {ANCHOR, MOMENTUM})

    run(main())


def test_nobody_to_take_a_state_from() -> None:
    async def main() -> None:
        scene = Scene(Network(1, CALM), None)
        assert await scene.catch_up.state(list, None) is None

    run(main())


def test_a_site_that_is_named_need_not_have_standing() -> None:
    async def main() -> None:
        scene = Scene(Network(1, CALM), at(1.0, "me", 3), founder="f", a=at(3.0, "a", 4))
        assert not scene.me.tools.standing.has("a")
        assert (await scene.state("a")).round == 4, "this site has met it, and does not know how that ended"

    run(main())
