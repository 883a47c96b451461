"""A site's rounds in pairs: which round it takes, from whose state, with whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from gossip.cases import LAST, SEED, PairMember, acquainted, hold_at, scene
from rounds.cases import CALM, LENGTH, outer_state
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.config.run import SITES, NolocoSection
from pier_node.gossip.pair_rounds import STALE
from pier_node.outer.advance import advance_pair
from pier_node.outer.mean import LIMIT, Update
from pier_node.outer.noloco import groups, partner
from pier_node.outer.state import OuterState
from pier_node.wire.carrier import Chunk, PeerRefused, Stage


def test_alone_a_site_takes_its_own_step() -> None:
    async def main() -> None:
        site = PairMember(Network(1, CALM), "a")
        state = await site.bring(0.5, tokens=7)
        assert (state.round, state.members, state.ledger) == (1, ("a",), {"a": 7})
        np.testing.assert_allclose(state.anchor, -0.35, atol=1e-6)
        np.testing.assert_allclose(state.momentum, -0.35, atol=1e-6)
        assert site.diary == ["saved 1"], "a round alone needs no record"
        assert np.isnan(site.pairs.spread)

    run(main())


def test_a_step_alone_drops_nothing_of_what_a_codec_would_have() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        error = np.full(LENGTH, 9.0, np.float32)  # as a meeting left it that failed
        update = Update(np.full(LENGTH, -0.5, np.float32), 7, error)
        await sites["a"].pairs.commit(1, update, sites["a"].save)
        np.testing.assert_array_equal(error, np.zeros(LENGTH))

    scene(play, "a")


def test_the_odd_one_out_goes_on_at_once() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        began = asyncio.get_running_loop().time()
        odd = groups(1, 1, "abc")[-1][0]
        assert (await sites[odd].bring(0.1)).members == (odd,)
        assert asyncio.get_running_loop().time() - began < 0.1

    scene(play, "abc")


def test_a_group_of_all_keeps_its_replicas_equal() -> None:
    """N = n = 2 is DiLoCo with heavy ball: the bits stay the same."""

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        for _ in range(3):
            await asyncio.gather(*(site.bring(amount) for site, amount in zip(sites.values(), (0.1, 0.3), strict=True)))
            assert sites["a"].pairs.state.digest == sites["b"].pairs.state.digest

    scene(play)


def test_messages_are_as_many_however_many_sites_there_are() -> None:
    """docs/noloco.md, "Messages", counted at the carrier, heartbeats left out; bytes are those of θ, or of θ and φ."""
    counts: dict[tuple[int, float], tuple[int, float]] = {}

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        calls, data = dict.fromkeys(sites, 0), dict.fromkeys(sites, 0)
        for node, site in sites.items():
            call, push = site.carrier.call, site.carrier.push

            async def calling(peer, method, request, timeout, node=node, call=call):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
                calls[node] += method.name != "Beat"
                return await call(peer, method, request, timeout)

            async def pushing(peer, chunks, node=node, push=push):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
                async def counted() -> AsyncIterator[Chunk]:
                    async for chunk in chunks:
                        data[node] += len(chunk.data)
                        yield chunk

                await push(peer, counted())

            site.carrier.call, site.carrier.push = calling, pushing  # type: ignore[method-assign]
        for _ in range(5):
            await asyncio.gather(*(site.bring(0.1) for site in sites.values()))
            await asyncio.sleep(3.0)
        assert all(len(site.pairs.state.members) == 2 for site in sites.values())
        counts[len(sites), sites["a"].tools.rates.gamma] = max(calls.values()), max(data.values()) / (5 * 4 * LENGTH)

    for names in ("ab", "abcd", "abcdefgh"):
        scene(play, names)
        scene(play, names, rates=NolocoSection(gamma=0.3))
    assert max(calls for calls, _ in counts.values()) <= 5 * 2, "a question and a vote a round"
    for (_, gamma), (_, models) in counts.items():
        assert models == pytest.approx(1.0 if gamma == 0.7 else 2.0, abs=0.21)


# --- which round ------------------------------------------------------------------------------------


def at(network: Network, **rounds: int) -> dict[str, PairMember]:
    return {node: PairMember(network, node, outer_state(node, round=round)) for node, round in rounds.items()}


async def known(sites: dict[str, PairMember]) -> None:
    for site in sites.values():
        site.meet(*sites)
    await acquainted(sites)


def test_a_little_behind_is_not_overtaken() -> None:
    async def main() -> None:
        sites = at(Network(1, CALM), a=3, b=4)
        await known(sites)
        assert (sites["a"].pairs.coming(), sites["b"].pairs.coming()) == (4, 5)

    run(main())


def test_who_was_overtaken_joins_those_in_front_in_their_next_round() -> None:
    """Unless the partner of its own round is as far behind as it is."""

    async def main() -> None:
        sites = at(Network(1, CALM), a=3, b=9, c=9, d=9)
        await known(sites)
        assert sites["a"].pairs.coming() == 10
        seed, names = SEED, "abcd"
        other = partner(seed, 4, names, "a")
        assert other
        sites[other].pairs.state = outer_state(other, round=3)
        await asyncio.sleep(3.0)
        assert sites["a"].pairs.coming() == 4

    run(main())


def test_nobody_goes_beyond_the_last_round() -> None:
    async def main() -> None:
        sites = at(Network(1, CALM), a=90, b=LAST)
        await known(sites)
        assert sites["a"].pairs.coming() == LAST

    run(main())


def test_an_overtaken_site_waits_for_those_in_front_as_long_as_it_took() -> None:
    """It has trained for round 4 for 40 s; b has just taken 6, and comes to 7 after 20 s."""

    async def main() -> None:
        sites = at(Network(1, CALM), a=3, b=6)
        await known(sites)
        a, b = sites["a"], sites["b"]
        a.pairs._rendezvous.deadline.__init__(5.0, 5.0)  # type: ignore[misc]
        await asyncio.sleep(40.0)
        first = a.bring(0.1, number=4)
        await asyncio.sleep(20.0)
        assert not first.done()
        second = b.bring(0.1)
        assert ((await first).round, (await second).round) == (7, 7)
        assert (await first).members == ("a", "b")

    run(main())


def test_an_overtaken_site_does_not_wait_for_ever() -> None:
    async def main() -> None:
        sites = at(Network(1, CALM), a=3, b=6)
        await known(sites)
        a = sites["a"]
        a.pairs._rendezvous.deadline.__init__(5.0, 5.0)  # type: ignore[misc]
        began = asyncio.get_running_loop().time()
        state = await a.bring(0.1, number=4)
        assert (state.round, state.members) == (7, ("a",))
        assert asyncio.get_running_loop().time() - began < 20

    run(main())


def test_who_is_far_behind_takes_a_state_of_those_in_front() -> None:
    async def main() -> None:
        sites = at(Network(1, CALM), a=3, b=3 + STALE, c=4 + STALE, d=5 + STALE)
        await known(sites)
        a, seen = sites["a"].pairs, set[str]()
        for _ in range(20):
            sources = a.sources()
            assert set(sources) == {"c", "d"}
            seen.add(sources[0])
        assert seen == {"c", "d"}, "in an order that nobody foresees"
        await a.adopt(outer_state("d", round=5 + STALE))
        assert (a.sources(), a.saved, a.coming()) == ([], 5 + STALE, 6 + STALE)

    run(main())


def test_the_first_round_waits_for_all_sites_unless_it_is_past() -> None:
    async def main() -> None:
        network = Network(1, CALM)
        sites = at(network, a=0, b=0)
        for site in sites.values():
            site.pairs.sites = 3
        await known(sites)
        waiting = sites["a"].bring(0.1)
        await asyncio.sleep(100.0)
        assert not waiting.done()
        late = PairMember(network, "c")
        late.meet("a", "b")
        await asyncio.sleep(3.0)
        assert sites["a"].pairs._is_open(1)
        network.crash("c")
        sites["b"].pairs.state = outer_state("b", round=1)
        assert (await waiting).round == 1

    run(main())


# --- what others may have -----------------------------------------------------------------------------


def test_only_what_is_saved_is_offered() -> None:
    async def main() -> None:
        held = asyncio.Event()
        site = PairMember(Network(1, CALM), "a", faults=hold_at("committed", held))
        pairs = site.pairs
        assert pairs.offer(0, False) is pairs.state
        task = site.bring(0.1)
        await site.tools.news.until(lambda: pairs.state.round == 1)
        assert pairs.offer(0, False) is None
        held.set()
        await task
        assert pairs.offer(0, False) is pairs.offer(1, False) is pairs.state
        assert pairs.offer(2, False) is None
        assert pairs.offer(1, True) is None

    run(main())


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        (Chunk.STAGE_SCATTER, "pairs do not send"),
        (Chunk.STAGE_ANCHOR, "pairs do not send"),
        (Chunk.STAGE_SWAP, "no such meeting"),
        (None, "an empty stream"),
    ],
)
def test_streams_of_nothing_are_refused(stage: Stage | None, problem: str) -> None:
    async def stream() -> AsyncIterator[Chunk]:
        if stage:
            yield Chunk(round=9, stage=stage, meeting=b"m" * 32)

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        with pytest.raises(PeerRefused, match=problem):
            await sites["a"].carrier.push("b", stream())

    scene(play)


def test_a_stream_for_a_round_that_is_past_is_refused_at_once() -> None:
    async def stream() -> AsyncIterator[Chunk]:
        yield Chunk(round=1, stage=Chunk.STAGE_SWAP, meeting=b"m" * 32)

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await asyncio.gather(*(site.bring(0.1) for site in sites.values()))
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerRefused, match="over"):
            await sites["a"].carrier.push("b", stream())
        assert asyncio.get_running_loop().time() - began < 1

    scene(play)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_site_alone_whose_training_diverged_stops() -> None:
    async def main() -> None:
        site = PairMember(Network(1, CALM), "a")
        site.pairs.state.momentum.fill(3e38)
        with pytest.raises(PierError, match="diverged"):
            await site.bring(0.1)
        assert site.pairs.state.round == 0

    run(main())


def test_a_step_that_cannot_be_saved_did_not_happen() -> None:
    async def full() -> None:
        raise PierError("the disk is full")

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        a, b = sites["a"], sites["b"]
        a.save = full  # type: ignore[method-assign]
        decider, voter = a.bring(0.1), b.bring(0.3)
        with pytest.raises(PierError, match="disk is full"):
            await decider
        assert (await voter).members == ("b",), "a has said that it did not take the step"
        assert a.pairs.decided.round == 0, "so its last checkpoint is of the state before"

    scene(play)


def test_the_solo_start() -> None:
    async def main() -> None:
        site = PairMember(Network(1, CALM), "a")

        def follow(state: OuterState, weights: SharedVector, tokens: dict[str, int]) -> OuterState:
            return advance_pair(state, state.round + 1, ["a"], [weights.array], tokens, site.tools.rates)

        weights = np.full(LENGTH, 2.0, np.float32)
        state = await site.pairs.commit_alone(Update(weights, 5), follow)  # type: ignore[arg-type]
        assert site.pairs.state is state
        assert (state.round, state.ledger, site.diary) == (1, {"a": 5}, [])

    run(main())


def test_whoever_stops_leaves_nothing_behind() -> None:
    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        await asyncio.gather(*(site.bring(0.1) for site in sites.values()))
        for site in sites.values():
            await site.pairs.stop()
            await site.pairs.at_rest()
            assert not site.pairs.exchanging
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "anchor ahead" not in names

    scene(play, rates=NolocoSection(gamma=0.3))


def test_a_ledger_that_was_fetched_does_not_part_a_site_from_the_others() -> None:
    """A liar's, taken by a site that was behind: with names and counts that no partner would take."""

    async def play(network: Network, sites: dict[str, PairMember]) -> None:
        ghosts = {f"{number:016x}": 7 for number in range(SITES)}
        fetched = replace(outer_state(["a"], round=1), ledger={**ghosts, "a": LIMIT, f"{1:016x}/2": 3})
        await sites["a"].pairs.adopt(fetched)
        state = await sites["a"].bring(0.1, tokens=9)
        assert state.ledger["a"] == LIMIT
        assert len(state.ledger) == SITES
        assert f"{1:016x}/2" not in state.ledger

    scene(play, "a")
