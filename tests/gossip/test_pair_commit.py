"""One meeting of a, which decides, and b: what becomes durable and known in which order, and what failures do."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from gossip.cases import PairMember, hold_at, scene, together
from simulation.network import Network

from pier_node.base.faults import Faults
from pier_node.config.run import SITES, NolocoSection
from pier_node.gossip.pair_commit import merged
from pier_node.outer.mean import LIMIT, Weighing
from pier_node.wire.carrier import SETTLE
from pier_proto.v1.peer_pb2 import SettleReply, SettleRequest


@pytest.mark.parametrize("gamma", [0.7, 0.3])
def test_both_take_the_step(gamma: float) -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await together(sites)
        for site in sites.values():
            state = site.pairs.state
            assert (state.round, state.members, state.ledger) == (1, ("a", "b"), {"a": 1, "b": 1})
            np.testing.assert_allclose(state.anchor, -0.7 * 0.2, atol=1e-6)
            assert site.pairs.spread == pytest.approx(0.2 / np.sqrt(2), rel=1e-5)
            assert site.journal.records.partners == {1: "b" if site.node == "a" else "a"}
            assert not site.journal.records.doubts

    scene(play, rates=NolocoSection(gamma=gamma))


def test_the_decider_saves_before_it_answers_and_the_other_writes_its_yes_before_it_says_so() -> None:
    order: list[str] = []

    def noting(node: str) -> Faults:
        async def strike(round: int, phase: str) -> None:
            order.append(f"{node} {phase}")

        return Faults(strike)

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await together(sites)
        assert sites["a"].diary == ["saved 1", "record"]
        assert sites["b"].diary == ["doubt", "saved 1", "record"]

    scene(play, a=noting("a"), b=noting("b"))
    assert (
        order.index("b journaled") < order.index("a voting") < order.index("a committed") < order.index("b committed")
    )
    assert "b voting" not in order
    assert "a journaled" not in order


def test_a_voter_that_hears_nothing_is_in_doubt_until_the_roster_drops_the_decider() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        loop, b = asyncio.get_running_loop(), sites["b"]
        sites["a"].bring(0.1)
        task, began = b.bring(0.3), loop.time()
        await b.durable("doubt")
        network.partition({"a"}, {"b"})
        state = await task
        assert (state.round, state.members) == (1, ("b",)), "alone, then"
        assert 4 < loop.time() - began < 25
        assert b.journal.records.doubts[1].decider == "a"
        np.testing.assert_allclose(state.anchor, -0.7 * 0.3, atol=1e-6)
        assert "gone" in b.pairs.last_error

    scene(play, a=hold_at("voting"))


def test_a_decider_that_hears_no_vote_goes_alone_and_says_no_to_a_late_one() -> None:
    late = asyncio.Event()

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        a, b = sites["a"].bring(0.1), sites["b"].bring(0.3)
        state = await a
        assert state.members == ("a",)
        late.set()
        assert (await b).members == ("b",)
        assert not sites["b"].journal.records.doubts, "it has an answer"
        assert "did not take the step" in sites["b"].pairs.last_error

    scene(play, b=hold_at("journaled", late))


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_no_spares_the_decider_the_wait() -> None:
    """b's own step is not finite: its momentum has run away."""

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        loop = asyncio.get_running_loop()
        sites["b"].pairs.state.momentum.fill(3e38)
        a, began = sites["a"].bring(0.1), loop.time()
        b = sites["b"].bring(0.3)
        assert (await a).members == ("a",)
        assert loop.time() - began < 3
        assert "said no" in sites["a"].pairs.last_error
        await asyncio.wait([b])
        assert "diverged" in str(b.exception())

    scene(play)


def test_other_means_are_not_agreed_to() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        a = sites["a"].bring(0.1)

        async def liar(request: SettleRequest) -> SettleReply:
            wrong = SettleRequest()
            wrong.CopyFrom(request)
            wrong.digest = b"?" * 32
            return await call("a", SETTLE, wrong, 10.0)

        carrier, call = sites["b"].carrier, sites["b"].carrier.call

        async def lie(peer: str, method: Any, request: Any, timeout: float) -> Any:
            return await (liar(request) if method is SETTLE else call(peer, method, request, timeout))

        carrier.call = lie  # type: ignore[method-assign]
        b = sites["b"].bring(0.3)
        assert (await a).members == ("a",)
        assert (await b).members == ("b",)
        assert "other means" in sites["a"].pairs.last_error

    scene(play)


def test_a_decider_that_is_stopped_in_the_middle_of_its_decision_ends_it_first() -> None:
    saving = asyncio.Event()

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        a, b = sites["a"].bring(0.1), sites["b"].bring(0.3)
        await sites["a"].tools.news.until(lambda: sites["a"].pairs.state.round == 1)
        a.cancel()
        await asyncio.sleep(1.0)
        assert not a.done()
        saving.set()
        await asyncio.wait([a])
        assert a.cancelled()
        assert (await b).members == ("a", "b")
        assert sites["a"].diary == ["saved 1", "record"]

    scene(play, a=hold_at("committed", saving))


def test_whoever_dies_before_it_voted_leaves_the_other_alone() -> None:
    for phase in ("met", "exchanging", "staged"):

        async def play(network: Network, sites: dict[str, PairMember]) -> None:
            loop, a = asyncio.get_running_loop(), sites["a"].bring(0.1)
            sites["b"].bring(0.3)
            began = loop.time()
            await asyncio.sleep(1.0)
            network.crash("b")
            assert (await a).members == ("a",)
            assert loop.time() - began < 10

        scene(play, b=hold_at(phase))


def test_the_ledger_of_two_has_what_each_says_of_itself_and_the_most_that_either_knows_of_others() -> None:
    a, b, c, d = (letter * 16 for letter in "abcd")
    told = {a: {a: 3, b: 9, c: 2}, b: {a: 7, b: 1, c: 5, d: 8}}
    assert merged(told, Weighing()) == {a: 3, b: 1, c: 5, d: 8}
    assert merged(told, Weighing(allowed=4)) == {a: 3, b: 1, c: 4, d: 4}


def test_a_partner_that_claims_more_tokens_than_there_can_be() -> None:
    """Of itself, of us and of sites that it makes up: we can meet others afterwards, and know what is ours."""
    ghosts = [f"{number:016x}" for number in range(SITES)]

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        a, b = sites.values()
        for site in sites.values():
            site.tools.weighing = lambda number: Weighing(allowed=100 * number)
        claims = dict.fromkeys([a.node, b.node, *ghosts[2:]], LIMIT)
        b.pairs._ledger_with = lambda *_: claims  # type: ignore[method-assign]
        await asyncio.gather(a.bring(0.1, tokens=7), b.bring(0.3))
        assert a.pairs.state.members == (a.node, b.node)
        ledger = a.pairs.state.ledger
        assert ledger == b.pairs.state.ledger
        assert (ledger[a.node], ledger[b.node], len(ledger)) == (7, 100, SITES)
        assert max(ledger.values()) == 100
        assert (await a.bring(0.1, tokens=5)).ledger[a.node] == 12
        assert len(a.pairs.state.ledger) == SITES

    scene(play)
