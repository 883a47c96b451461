from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from wire.memory_carrier import MemoryNet
from wire.state_cases import PIECE, Site, outer_state

from pier_node.outer import state as states
from pier_node.wire.carrier import DESCRIBE, PeerRefused
from pier_node.wire.manifest import examine
from pier_proto.v1.peer_pb2 import FetchRequest, Manifest, StateRequest

LENGTH = 4 * PIECE + 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", PIECE)


class Asker:
    """A peer that talks to the site `a`."""

    def __init__(self, idle: float = 60.0) -> None:
        net = MemoryNet()
        self.site = Site(net, "a", outer_state(LENGTH), idle)
        self._carrier = net.join("z")

    async def describe(self, round: int = 0, shadow: bool = False) -> Manifest:
        return await self._carrier.call("a", DESCRIBE, StateRequest(round=round, shadow=shadow), 60.0)

    async def fetch(self, round: int = 7, tensor: str = "anchor", offset: int = 0, length: int = LENGTH) -> bytes:
        request = FetchRequest(round=round, tensor=tensor, offset=offset, length=length)
        return b"".join([chunk.data async for chunk in self._carrier.pull("a", request)])


async def test_pieces_of_what_is_held() -> None:
    asker = Asker()
    anchor = asker.site.state.anchor.tobytes()
    assert await asker.fetch() == anchor, "whether it was described or not"
    assert await asker.fetch(offset=PIECE, length=2 * PIECE) == anchor[4 * PIECE : 12 * PIECE]
    assert await asker.fetch(offset=4 * PIECE, length=3) == anchor[-12:]


@pytest.mark.parametrize(
    ("offset", "length"), [(1, PIECE), (0, 1), (0, 0), (0, LENGTH + 1), (5 * PIECE, PIECE), (PIECE, 2**63)]
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
        asker.site.state = outer_state(LENGTH, round=round)
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
    asker.site.state = outer_state(LENGTH, round=8)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(PeerRefused, match="round 7 is not held"):
        await asker.fetch(7)


async def test_a_newer_staged_result_takes_the_place_of_the_old() -> None:
    asker = Asker()
    for seed in (1, 50):
        asker.site.staged = outer_state(LENGTH, round=8, seed=seed)
        described = examine(await asker.describe(8, shadow=True), LENGTH)
        assert described.digest == asker.site.staged.digest


async def test_shared_moments_are_part_of_the_state() -> None:
    asker = Asker()
    asker.site.state = outer_state(LENGTH, adam=True)
    described = examine(await asker.describe(), LENGTH)
    assert (described.digest, described.adam_step) == (asker.site.state.digest, 9)
    assert await asker.fetch(tensor="adam_v") == asker.site.state.tensors["adam_v"].array.tobytes()
