from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.memory_carrier import MemoryNet
from wire.state_cases import PIECE, Site, outer_state

from pier_node.outer import state as states
from pier_node.wire.carrier import DESCRIBE, BadMessage, Chunk, PeerRefused
from pier_node.wire.states import RUN, Partial, Piece, describe, examine, pieces
from pier_proto.v1.peer_pb2 import FetchRequest, Manifest, StateRequest, Tensor

LENGTH = 5 * PIECE + 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", PIECE)


def test_pieces_of_a_vector() -> None:
    assert [pieces(length) for length in (0, 1, PIECE, PIECE + 1)] == [0, 1, 1, 2]


def test_a_description_says_what_the_state_is() -> None:
    state = outer_state(LENGTH)
    described = examine(describe(state), LENGTH)
    assert (described.round, described.members, described.ledger) == (7, ("a", "b"), {"a": 300, "b": 2**40})
    assert described.digest == state.digest
    assert described.state == state.hashes
    assert described.build(state.tensors) == state
    assert described.build(state.tensors).digest == state.digest


def test_moments_of_a_synchronous_run_are_inside_the_digest() -> None:
    state = outer_state(LENGTH, adam=True)
    described = examine(describe(state), LENGTH)
    assert set(described.state) == set(state.tensors)
    assert described.build(state.tensors).adam_step == 9


def set_length(manifest: Manifest) -> None:
    manifest.tensors[0].length = 2**60


def set_all_lengths(manifest: Manifest) -> None:
    for tensor in manifest.tensors:
        tensor.length = LENGTH - 1


def drop_hash(manifest: Manifest) -> None:
    del manifest.tensors[0].hashes[-1]


def shorten_hash(manifest: Manifest) -> None:
    manifest.tensors[0].hashes[0] = b"short"


def change_hash(manifest: Manifest) -> None:
    manifest.tensors[1].hashes[0] = bytes(32)


def change_pieces(manifest: Manifest) -> None:
    manifest.piece_length = 1


def drop_tensor(manifest: Manifest) -> None:
    del manifest.tensors[0]


def repeat_tensor(manifest: Manifest) -> None:
    manifest.tensors.append(manifest.tensors[0])


def add_tensor(manifest: Manifest) -> None:
    manifest.tensors.append(Tensor(name="other", length=LENGTH, hashes=manifest.tensors[0].hashes))


def add_member(manifest: Manifest) -> None:
    manifest.members.append("c")


def change_ledger(manifest: Manifest) -> None:
    manifest.ledger["a"] = 0


def change_round(manifest: Manifest) -> None:
    manifest.round = 2**63


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (set_length, f"anchor has {2**60} elements"),
        (set_all_lengths, f"this run's model has {LENGTH}"),
        (drop_hash, "5 hashes for 6 pieces"),
        (shorten_hash, "6 hashes for 6 pieces"),
        (change_hash, "digest"),
        (change_pieces, f"pieces have 1 elements, ours {PIECE}"),
        (drop_tensor, "lists the tensors momentum"),
        (repeat_tensor, "lists the tensors anchor, momentum, anchor"),
        (add_tensor, "lists the tensors anchor, momentum, other"),
        (add_member, "digest"),
        (change_ledger, "digest"),
        (change_round, "digest"),
        (Manifest.Clear, "pieces have 0 elements"),
    ],
)
def test_a_bad_manifest_is_refused(spoil: Callable[[Manifest], None], complaint: str) -> None:
    manifest = describe(outer_state(LENGTH))
    spoil(manifest)
    with pytest.raises(BadMessage, match=complaint):
        examine(manifest, LENGTH)


# --- the pieces that have arrived ----------------------------------------------------------------

LONG = 40 * PIECE + 5
STATE = outer_state(LONG)


def hashes() -> dict[str, list[bytes]]:
    return {name: states.piece_hashes(shared.array) for name, shared in STATE.tensors.items()}


def partial() -> Partial:
    wanted = Partial()
    wanted.aim(hashes(), LONG)
    return wanted


def chunk(piece: Piece) -> Chunk:
    return Chunk(offset=piece.start, data=STATE.tensors[piece.tensor].array[piece.start : piece.end].tobytes())


def test_runs_are_neighbours_and_shrink_towards_the_end() -> None:
    wanted, sizes = partial(), []
    while run := wanted.take(2):
        assert {piece.tensor for piece in run} == {run[0].tensor}
        assert all(one.end == other.start for one, other in pairwise(run))
        sizes.append(len(run))
    assert sum(sizes) == 82
    assert max(sizes) == RUN
    assert sizes[-3:] == [1, 1, 1]


@given(st.integers(0, 2**32))
def test_whatever_the_order_it_ends_with_the_state(seed: int) -> None:
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "PIECE", PIECE)
        wanted, flying = partial(), list[list[Piece]]()
        while not wanted.complete:
            if run := wanted.take(chance.randint(1, 4)):
                flying.append(run)
            landed = flying.pop(chance.randrange(len(flying)))
            for piece in landed[: chance.randint(0, len(landed))]:
                wanted.accept(piece, chunk(piece))
            wanted.put_back(landed)
    assert wanted.progress == (8 * LONG, 8 * LONG)
    for name, arrived in wanted.hand_over().items():
        assert np.array_equal(arrived.array, STATE.tensors[name].array)


@pytest.mark.parametrize("change", [{"offset": PIECE}, {"data": bytes(4 * PIECE)}, {"data": b""}])
def test_a_piece_is_taken_by_its_hash_only(change: dict[str, object]) -> None:
    wanted = partial()
    run = wanted.take(1)
    sent = chunk(run[0])
    for field, value in change.items():
        setattr(sent, field, value)
    with pytest.raises(BadMessage, match="anchor from element 0 on"):
        wanted.accept(run[0], sent)
    assert wanted.progress[0] == 0


async def test_who_finds_nothing_to_do_waits_for_what_others_may_give_back() -> None:
    wanted = partial()
    runs = list(iter(lambda: wanted.take(1), []))
    waiter = asyncio.create_task(wanted.settle())
    await asyncio.sleep(0)
    assert not waiter.done()
    wanted.put_back(runs.pop())
    assert await waiter, "there is work again"


async def test_who_finds_nothing_to_do_is_told_that_all_is_here() -> None:
    wanted = partial()
    pieces = [piece for run in iter(lambda: wanted.take(1), []) for piece in run]
    waiter = asyncio.create_task(wanted.settle())
    for piece in pieces:
        await asyncio.sleep(0)
        assert not waiter.done()
        wanted.accept(piece, chunk(piece))
    assert not await waiter


def test_aiming_at_the_same_keeps_what_is_here() -> None:
    wanted = partial()
    run = wanted.take(1)
    wanted.accept(run[0], chunk(run[0]))
    wanted.put_back(run)
    wanted.aim(hashes(), LONG)
    assert wanted.progress[0] == 4 * PIECE
    wanted.aim({"anchor": states.piece_hashes(STATE.momentum)}, LONG)
    assert wanted.progress == (0, 4 * LONG)


SERVED = 4 * PIECE + 3


class Asker:
    """A peer that talks to the site `a`."""

    def __init__(self, idle: float = 60.0) -> None:
        net = MemoryNet()
        self.site = Site(net, "a", outer_state(SERVED), idle)
        self._carrier = net.join("z")

    async def describe(self, round: int = 0, shadow: bool = False) -> Manifest:
        return await self._carrier.call("a", DESCRIBE, StateRequest(round=round, shadow=shadow), 60.0)

    async def fetch(self, round: int = 7, tensor: str = "anchor", offset: int = 0, length: int = SERVED) -> bytes:
        request = FetchRequest(round=round, tensor=tensor, offset=offset, length=length)
        return b"".join([chunk.data async for chunk in self._carrier.pull("a", request)])


async def test_pieces_of_what_is_held() -> None:
    asker = Asker()
    anchor = asker.site.state.anchor.tobytes()
    assert await asker.fetch() == anchor, "whether it was described or not"
    assert await asker.fetch(offset=PIECE, length=2 * PIECE) == anchor[4 * PIECE : 12 * PIECE]
    assert await asker.fetch(offset=4 * PIECE, length=3) == anchor[-12:]


@pytest.mark.parametrize(
    ("offset", "length"), [(1, PIECE), (0, 1), (0, 0), (0, SERVED + 1), (5 * PIECE, PIECE), (PIECE, 2**63)]
)
async def test_other_ranges_are_refused(offset: int, length: int) -> None:
    with pytest.raises(PeerRefused, match="are not pieces of a vector of 35"):
        await Asker().fetch(offset=offset, length=length)


async def test_what_is_not_here_is_refused() -> None:
    asker = Asker()
    with pytest.raises(PeerRefused, match="the state of round 8 is not held"):
        await asker.describe(8)
    with pytest.raises(PeerRefused, match="the staged result of round 7 is not held"):
        await asker.describe(7, shadow=True)
    with pytest.raises(PeerRefused, match="no tensor 'adam_m'"):
        await asker.fetch(tensor="adam_m")
    with pytest.raises(PeerRefused, match="round 0 is not held here any more"):
        await asker.fetch(round=0)


async def test_at_most_two_states_are_held_and_the_oldest_goes() -> None:
    asker = Asker()
    freed = []
    for round in (7, 8, 9):
        asker.site.state = outer_state(SERVED, round=round)
        freed.append(weakref.ref(asker.site.state))
        await asker.describe()
        if round == 8:
            await asker.fetch(7)
    gc.collect()
    assert [reference() is None for reference in freed] == [False, True, False], "7 was used after 8"
    with pytest.raises(PeerRefused):
        await asker.fetch(8)
    await asker.fetch(7)


async def test_a_state_that_nobody_uses_is_let_go() -> None:
    asker = Asker(idle=0.0)
    await asker.describe()
    asker.site.state = outer_state(SERVED, round=8)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(PeerRefused, match="round 7 is not held"):
        await asker.fetch(7)


async def test_a_newer_staged_result_takes_the_place_of_the_old() -> None:
    asker = Asker()
    for seed in (1, 50):
        asker.site.staged = outer_state(SERVED, round=8, seed=seed)
        described = examine(await asker.describe(8, shadow=True), SERVED)
        assert described.digest == asker.site.staged.digest


async def test_shared_moments_are_part_of_the_state() -> None:
    asker = Asker()
    asker.site.state = outer_state(SERVED, adam=True)
    described = examine(await asker.describe(), SERVED)
    assert (described.digest, described.adam_step) == (asker.site.state.digest, 9)
    assert await asker.fetch(tensor="adam_v") == asker.site.state.tensors["adam_v"].array.tobytes()
