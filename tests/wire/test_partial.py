from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.state_cases import PIECE, outer_state

from pier_node.outer import state as states
from pier_node.wire.carrier import BadMessage
from pier_node.wire.partial import RUN, Partial, Piece
from pier_proto.v1.peer_pb2 import Chunk

LENGTH = 40 * PIECE + 5
STATE = outer_state(LENGTH)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", PIECE)


def hashes() -> dict[str, list[bytes]]:
    return {name: states.piece_hashes(shared.array) for name, shared in STATE.tensors.items()}


def partial() -> Partial:
    wanted = Partial()
    wanted.aim(hashes(), LENGTH)
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
    assert wanted.progress == (8 * LENGTH, 8 * LENGTH)
    for name, vector in wanted.hand_over().items():
        assert np.array_equal(vector.array, STATE.tensors[name].array)


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
    wanted.aim(hashes(), LENGTH)
    assert wanted.progress[0] == 4 * PIECE
    wanted.aim({"anchor": states.piece_hashes(STATE.momentum)}, LENGTH)
    assert wanted.progress == (0, 4 * LENGTH)
