"""How a link is measured. Links are made up, and time passes only in them: see simulation/virtual_time.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from simulation.virtual_time import run

from pier_node.wire.carrier import CHUNK_BYTES, PeerLost
from pier_node.wire.probe import LONG_ENOUGH, SIZES, LinkSpeed, measure
from pier_proto.v1.peer_pb2 import ProbeReply, ProbeRequest

EPOCH = 1.7e9


@dataclass
class Line:
    """A line to a peer: seconds of round trip, bytes a second each way, how far the peer's clock is ahead."""

    round_trip: float
    up: float
    down: float
    ahead: float = 0.0
    carried: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def __post_init__(self) -> None:
        self._ways = {"up": asyncio.Lock(), "down": asyncio.Lock()}

    async def ask(self, request: ProbeRequest) -> ProbeReply:
        assert len(request.padding) <= CHUNK_BYTES
        assert request.reply_size <= CHUNK_BYTES
        await asyncio.sleep(self.round_trip / 2)
        await self._carry("up", len(request.padding), self.up)
        reply = ProbeReply(padding=bytes(request.reply_size), time=self.clock() + self.ahead)
        await self._carry("down", request.reply_size, self.down)
        await asyncio.sleep(self.round_trip / 2)
        return reply

    def clock(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    async def _carry(self, way: str, size: int, rate: float) -> None:
        async with self._ways[way]:
            await asyncio.sleep(size / rate)
            self.carried[way] += size


def measured(line: Line) -> tuple[LinkSpeed, float]:
    """What the measurement says, and the seconds that it took."""

    async def main() -> tuple[LinkSpeed, float]:
        return await measure(line.ask, line.clock), asyncio.get_running_loop().time()

    return run(main())


@pytest.mark.parametrize("up", [12_500.0, 125e4, 125e6, 125e7])
@pytest.mark.parametrize("round_trip", [0.0005, 0.04, 0.3])
def test_a_line_is_as_fast_as_it_is(up: float, round_trip: float) -> None:
    """From 100 kbit/s to 10 Gbit/s, around the corner or around the world."""
    line = Line(round_trip, up, up * 4)
    link, took = measured(line)
    assert link.round_trip == pytest.approx(round_trip, rel=1e-4)
    assert link.up == pytest.approx(up, rel=0.01)
    assert link.down == pytest.approx(4 * up, rel=0.01)
    assert took < 15


def test_a_slow_line_is_not_held_for_long() -> None:
    line = Line(0.05, 12_500, 1e9)
    measured(line)
    assert line.carried["up"] == SIZES[0]
    assert line.carried["down"] == sum(SIZES)
    assert SIZES[0] / 12_500 > LONG_ENOUGH


@pytest.mark.parametrize("ahead", [0.0, 12.0, -86_400.0])
def test_clocks_are_compared_in_the_middle_of_the_round_trip(ahead: float) -> None:
    link, _ = measured(Line(0.2, 1e9, 1e9, ahead))
    assert link.clock_ahead == pytest.approx(ahead, abs=1e-6)


def test_the_quickest_answer_counts() -> None:
    """A peer that is busy at first is not farther away for that."""
    line = Line(0.02, 1e9, 1e9)
    late = iter([3.0, 1.0])

    async def ask(request: ProbeRequest) -> ProbeReply:
        await asyncio.sleep(next(late, 0.0))
        return await line.ask(request)

    async def main() -> LinkSpeed:
        return await measure(ask, line.clock)

    link = run(main())
    assert link.round_trip == pytest.approx(0.02)
    assert link.clock_ahead == pytest.approx(0.0, abs=1e-6)


def test_a_peer_that_is_lost_is_lost() -> None:
    async def ask(request: ProbeRequest) -> ProbeReply:
        raise PeerLost("b", "gone")

    with pytest.raises(PeerLost, match="gone"):
        run(measure(ask))
