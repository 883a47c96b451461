from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.memory_carrier import MemoryNet, Spoil
from wire.state_cases import PIECE, Site, outer_state, same_bits

from pier_node.outer import state as states
from pier_node.outer.state import OuterState
from pier_node.rounds.catch_up import Fetched, Tries, Wanted, fetch_state
from pier_node.wire.carrier import Chunk, PeerLost

LENGTH = 100 * PIECE + 3
PIECES = 2 * 101


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", PIECE)


async def fetch(net: MemoryNet, peers: str, **wanted: object) -> Fetched:
    """Fetch for a newcomer, `z`, from peers with one-letter names."""
    how = {name: wanted.pop(name) for name in ("tries", "progress", "timeout") if name in wanted}
    parameters: dict[str, object] = {"length": LENGTH, **wanted}
    given = {"timeout": 60.0, **how}
    return await fetch_state(net.join("z"), list(peers), Wanted(**parameters), **given)  # type: ignore[arg-type]


def network(state: OuterState, nodes: str) -> tuple[MemoryNet, dict[str, Site]]:
    net = MemoryNet()
    return net, {node: Site(net, node, state) for node in nodes}


def on_chunk(number: int, act: Callable[[Chunk], Chunk]) -> Spoil:
    """Leaves chunks alone until the one with this number."""
    count = itertools.count()

    async def spoil(chunk: Chunk) -> Chunk:
        return act(chunk) if next(count) >= number else chunk

    return spoil


def flip_bit(chunk: Chunk) -> Chunk:
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
    return chunk


def die(chunk: Chunk) -> Chunk:
    raise PeerLost("?", "connection reset")


def pieces_from(net: MemoryNet, node: str) -> int:
    return sum(-(-request.length // PIECE) for server, request in net.pulled if server == node)


async def test_a_state_arrives_bit_for_bit() -> None:
    state = outer_state(LENGTH)
    net, _ = network(state, "a")
    fetched = await fetch(net, "a", digest=state.digest)
    assert same_bits(fetched.state, state)
    assert fetched.state.digest == state.digest
    assert fetched.state.hashes == OuterState(7, (), fetched.state.tensors, {}).hashes, "hashes of what is in memory"


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 3 * PIECE + 1), peers=st.integers(1, 3), adam=st.booleans())
async def test_any_length(length: int, peers: int, adam: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "PIECE", PIECE)
        state = outer_state(length, adam=adam)
        net, _ = network(state, "abc"[:peers])
        fetched = await fetch(net, "abc"[:peers], length=length)
    assert same_bits(fetched.state, state)


async def test_a_state_of_the_run_has_momentum_and_that_of_a_stage_need_not_have_it() -> None:
    """Without it, no outer step can follow: a member that hands one over as its result would end all others."""
    state = outer_state(LENGTH, adam=True)
    bare = replace(state, tensors={name: it for name, it in state.tensors.items() if name != states.MOMENTUM})
    net, _ = network(bare, "a")
    with pytest.raises(PeerLost, match="its manifest is refused: it lists the tensors"):
        await fetch(net, "a", digest=bare.digest)
    assert (await fetch(net, "a", digest=bare.digest, stage=1)).state.digest == bare.digest


async def test_peers_share_the_work() -> None:
    net, _ = network(outer_state(LENGTH), "abc")
    await fetch(net, "abc")
    given = [pieces_from(net, node) for node in "abc"]
    assert sum(given) == PIECES, "no piece twice"
    assert min(given) > PIECES / 6


async def test_a_slow_peer_gets_less() -> None:
    net, _ = network(outer_state(LENGTH), "ab")

    async def slow(chunk: Chunk) -> Chunk:
        for _ in range(9):
            await asyncio.sleep(0)
        return chunk

    net.spoils["a"] = slow
    await fetch(net, "ab")
    assert pieces_from(net, "b") > 4 * pieces_from(net, "a") > 0


async def test_a_peer_that_corrupts_is_named_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    state = outer_state(LENGTH)
    net, _ = network(state, "abc")
    net.spoils["b"] = on_chunk(5, flip_bit)
    assert same_bits((await fetch(net, "abc")).state, state)
    [record] = caplog.records
    assert record.getMessage().startswith("state transfer: b is left out: ")
    assert "not what its hash says" in record.getMessage()


async def test_what_a_dead_peer_owed_comes_from_others() -> None:
    state = outer_state(LENGTH)
    net, _ = network(state, "abc")
    net.spoils["a"] = on_chunk(3, die)
    assert same_bits((await fetch(net, "abc")).state, state)


async def test_a_stream_must_be_what_was_asked_for() -> None:
    net, _ = network(outer_state(LENGTH), "a")

    def shift(chunk: Chunk) -> Chunk:
        chunk.offset += PIECE
        return chunk

    net.spoils["a"] = on_chunk(2, shift)
    with pytest.raises(PeerLost, match="anchor from element 16 on"):
        await fetch(net, "a")


async def test_silence_has_a_deadline() -> None:
    net, _ = network(outer_state(LENGTH), "a")

    async def hang(chunk: Chunk) -> Chunk:
        await asyncio.Event().wait()
        return chunk

    net.spoils["a"] = hang
    with pytest.raises(PeerLost, match=r"it sent nothing for 0\.01 s"):
        await fetch(net, "a", timeout=0.01)


async def test_a_peer_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    state = outer_state(LENGTH)
    net, _ = network(state, "ab")

    async def mute(_peer: str, _request: object) -> object:
        return await asyncio.Event().wait()

    monkeypatch.setitem(net.nodes["b"]._handlers, "Describe", mute)
    assert same_bits((await fetch(net, "ab")).state, state)


async def test_resuming_fetches_only_the_rest() -> None:
    state = outer_state(LENGTH)
    net, _ = network(state, "abc")
    net.spoils = {"a": on_chunk(30, die), "b": on_chunk(50, die)}
    tries, seen = Tries(), list[tuple[int, int]]()
    with pytest.raises(PeerLost, match=r"nobody is left .*a: connection reset; b: connection reset") as lost:
        await fetch(net, "ab", tries=tries, progress=lambda here, total: seen.append((here, total)))
    assert lost.value.node == "b"
    assert seen[-1] == (4 * 80 * PIECE, 4 * 2 * LENGTH)
    assert same_bits((await fetch(net, "c", tries=tries)).state, state)
    assert pieces_from(net, "c") == PIECES - 80


@pytest.mark.parametrize("late", [False, True])
async def test_what_a_round_left_as_it_was_is_not_fetched(late: bool) -> None:
    """Neither what the own state has, nor what had arrived of an older one."""
    old = outer_state(LENGTH)
    new = outer_state(LENGTH, round=old.round + 1)
    for name, vector in new.tensors.items():
        vector.array[:] = old.tensors[name].array
    new.anchor[10 * PIECE : 30 * PIECE] += 1
    net, sites = network(new, "ab")
    tries = Tries() if late else Tries(own=old)
    if late:
        sites["b"].state, net.spoils = old, {"b": on_chunk(PIECES - 5, die)}
        with pytest.raises(PeerLost):
            await fetch(net, "b", tries=tries)
    assert same_bits((await fetch(net, "a", tries=tries)).state, new)
    assert 20 <= pieces_from(net, "a") <= (25 if late else 20)


async def test_a_cancelled_transfer_can_be_resumed() -> None:
    state = outer_state(LENGTH)
    net, _ = network(state, "ab")
    reached, tries = asyncio.Event(), Tries()

    async def stop(chunk: Chunk) -> Chunk:
        reached.set()
        await asyncio.Event().wait()
        return chunk

    net.spoils["a"] = stop
    task = asyncio.create_task(fetch(net, "a", tries=tries))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert same_bits((await fetch(net, "b", tries=tries)).state, state)


async def test_another_digest_than_the_wanted_one_is_refused() -> None:
    wanted = outer_state(LENGTH)
    net, sites = network(wanted, "ab")
    sites["a"].state = outer_state(LENGTH, seed=50)
    assert same_bits((await fetch(net, "ab", digest=wanted.digest)).state, wanted)
    with pytest.raises(PeerLost, match=r"has the digest .* wanted"):
        await fetch(net, "a", digest=wanted.digest)


async def test_peers_with_another_state_of_that_round_do_not_help() -> None:
    state = outer_state(LENGTH)
    net, sites = network(state, "ab")
    sites["b"].state = outer_state(LENGTH, seed=50)
    assert same_bits((await fetch(net, "ab")).state, state)
    assert pieces_from(net, "b") == 0


async def test_an_absurd_manifest_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = network(outer_state(LENGTH + 1), "a")
    monkeypatch.setattr("pier_node.wire.states.SharedVector", None)
    with pytest.raises(PeerLost, match=f"anchor has {LENGTH + 1} elements, this run's model has {LENGTH}"):
        await fetch(net, "a")


async def test_a_state_goes_on_being_served_when_its_node_moves_on() -> None:
    state = outer_state(LENGTH)
    net, sites = network(state, "ab")

    def commit(chunk: Chunk) -> Chunk:
        for site in sites.values():
            site.state = outer_state(LENGTH, round=8, seed=50)
        return chunk

    net.spoils["a"] = on_chunk(1, commit)
    assert same_bits((await fetch(net, "ab")).state, state)


async def test_peers_that_moved_on_before_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    state = outer_state(LENGTH)
    net, sites = network(state, "ab")
    sites["b"].state = outer_state(LENGTH, round=8)
    assert same_bits((await fetch(net, "ab", round=7)).state, state)
    assert "b is left out: the state of round 7 is not held here" in caplog.text


async def test_a_staged_result_is_fetched_by_its_round() -> None:
    net, sites = network(outer_state(LENGTH), "a")
    sites["a"].staged = staged = outer_state(LENGTH, round=8, seed=50)
    assert same_bits((await fetch(net, "a", round=8, shadow=True, digest=staged.digest)).state, staged)
    with pytest.raises(PeerLost, match="the staged result of round 9 is not held here"):
        await fetch(net, "a", round=9, shadow=True)


async def test_moments_that_are_part_of_the_state_come_with_it() -> None:
    state = outer_state(LENGTH, adam=True)
    net, _ = network(state, "a")
    fetched = await fetch(net, "a")
    assert same_bits(fetched.state, state)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["anchor", "momentum", "adam_m", "adam_v"])
async def test_a_state_that_is_not_finite_is_refused(tensor: str, value: float) -> None:
    state = outer_state(LENGTH, adam=True)
    state.tensors[tensor].array[50] = value
    net, _ = network(state, "ab")
    with pytest.raises(PeerLost, match=f"a: {tensor} has values that are not finite"):
        await fetch(net, "ab", digest=state.digest)


async def test_a_state_with_negative_second_moments_is_refused() -> None:
    state = outer_state(LENGTH, adam=True)
    state.tensors["adam_v"].array[-1] = -1e-30
    with pytest.raises(PeerLost, match="adam_v has negative values"):
        await fetch(network(state, "a")[0], "a")


async def test_nobody_to_ask() -> None:
    with pytest.raises(PeerLost, match="nobody is left"):
        await fetch(MemoryNet(), "")
    with pytest.raises(PeerLost, match="q: unreachable"):
        await fetch(MemoryNet(), "q")
