"""A peer that sends just enough not to be silent: a piece every 19 s. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from simulation.virtual_time import run
from wire.memory_carrier import MemoryNet
from wire.state_cases import PIECE, Site, outer_state, same_bits

from pier_node.outer import state as states
from pier_node.rounds import catch_up as transfer
from pier_node.rounds.catch_up import PATIENCE, SILENCE, Fetched, Tries, Wanted, fetch_state
from pier_node.wire.carrier import Chunk, PeerLost
from pier_node.wire.states import RUN

LENGTH = 100 * PIECE + 3
PACE = SILENCE - 1
STATE, ANOTHER = outer_state(LENGTH), outer_state(LENGTH, seed=50)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", PIECE)


async def slowly(chunk: Chunk) -> Chunk:
    await asyncio.sleep(PACE)
    return chunk


def network(**held: states.OuterState) -> tuple[MemoryNet, dict[str, Site]]:
    """Peers with these states; `a` is slow."""
    net = MemoryNet()
    net.spoils["a"] = slowly
    return net, {node: Site(net, node, state) for node, state in held.items()}


async def fetch(net: MemoryNet, peers: Iterable[str], tries: Tries) -> Fetched:
    return await fetch_state(net.join("z"), tries.order(peers), Wanted(LENGTH), tries)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_it_holds_up_nobody_for_longer_than_one_run_while_others_have_the_state() -> None:
    async def main() -> None:
        net, _ = network(a=STATE, b=STATE)
        assert same_bits((await fetch(net, "ab", Tries())).state, STATE)
        assert 0 < now() < RUN * SILENCE

    run(main())


def test_when_only_it_has_the_state_another_state_is_asked_for() -> None:
    async def main() -> None:
        net, _ = network(a=STATE, b=ANOTHER)
        tries = Tries()
        with pytest.raises(PeerLost, match=r"a: not all have what it sends, and that comes slowly: \d+ of 6424 bytes"):
            await fetch(net, "ab", tries)
        assert PATIENCE < now() < PATIENCE + 2 * SILENCE
        assert same_bits((await fetch(net, "ab", tries)).state, ANOTHER)
        assert now() < PATIENCE + 2 * SILENCE

    run(main())


def test_others_that_are_in_league_with_it_do_not_make_it_last_longer() -> None:
    async def main() -> None:
        net, _ = network(a=STATE, b=ANOTHER, c=STATE)
        net.spoils["c"] = slowly
        tries = Tries()
        with pytest.raises(PeerLost, match="that comes slowly"):
            await fetch(net, "abc", tries)
        assert PATIENCE < now() < PATIENCE + 2 * SILENCE
        assert tries.order("acb")[0] == "b"

    run(main())


def test_a_state_that_comes_at_the_least_rate_may_take_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LEAST", 4 * PIECE / SILENCE)

    async def main() -> None:
        net, _ = network(a=STATE, b=ANOTHER)
        assert same_bits((await fetch(net, "ab", Tries())).state, STATE)
        assert now() > 2 * PATIENCE

    run(main())


def test_pieces_that_are_here_are_not_fetched_again_and_patience_doubles() -> None:
    async def main() -> None:
        net, _ = network(a=STATE, b=ANOTHER)
        tries, ends = Tries(others=True), list[float]()
        for _ in range(2):
            with pytest.raises(PeerLost):
                await fetch(net, "a", tries)
            ends.append(now())
        assert ends == pytest.approx([PATIENCE, 3 * PATIENCE], abs=4 * SILENCE)
        here = tries.partial.progress[0] // (4 * PIECE)
        assert here > 80
        Site(net, "c", STATE)
        net.pulled.clear()
        assert same_bits((await fetch(net, "c", tries)).state, STATE)
        assert sum(-(-request.length // PIECE) for _, request in net.pulled) == 2 * 101 - here

    run(main())


def test_who_has_nobody_else_to_ask_is_patient() -> None:
    async def main() -> None:
        net, _ = network(a=STATE)
        fetched = await fetch_state(net.join("z"), ["a"], Wanted(LENGTH))
        assert same_bits(fetched.state, STATE)
        assert now() == pytest.approx(2 * 101 * PACE)

    run(main())
