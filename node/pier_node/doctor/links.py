"""Measures the way to a peer with Probe: round trip, clock, and what it carries in each direction.

Bytes go as those of a round do, in messages of up to 1 MiB, several at once over one connection. There are more of them
each time until they take long enough to be measured, so that a slow line is not held for minutes, nor a fast one
mistaken for its latency.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pier_node.wire.carrier import CHUNK_BYTES
from pier_proto.v1.peer_pb2 import ProbeReply, ProbeRequest

PINGS = 5
STREAMS = 4
SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24))
"""Bytes of one try after the other, in each direction."""
LONG_ENOUGH = 0.5
"""Seconds that a try must take for its rate to be believed; the last one is in any case."""

Ask = Callable[[ProbeRequest], Awaitable[ProbeReply]]
"""Asks the peer. Raises PeerLost."""


@dataclass(frozen=True)
class Link:
    """The way to a peer.

    Attributes:
        round_trip: seconds.
        clock_ahead: seconds that the peer's clock is ahead of ours; known to half a round trip.
        up: bytes a second from here to there.
        down: bytes a second from there to here.
    """

    round_trip: float
    clock_ahead: float
    up: float
    down: float


async def measure(ask: Ask, clock: Callable[[], float] = time.time) -> Link:
    """Measure a link; takes a few seconds and at most twice the sum of SIZES. Raises PeerLost."""
    round_trip, clock_ahead = min([await _ping(ask, clock) for _ in range(PINGS)])
    noise = os.urandom(CHUNK_BYTES)
    up = await _rate(ask, round_trip, lambda size: ProbeRequest(padding=noise[:size]))
    down = await _rate(ask, round_trip, lambda size: ProbeRequest(reply_size=size))
    return Link(round_trip, clock_ahead, up, down)


async def _ping(ask: Ask, clock: Callable[[], float]) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    began, at = loop.time(), clock()
    reply = await ask(ProbeRequest())
    round_trip = loop.time() - began
    return round_trip, reply.time - (at + round_trip / 2)


async def _rate(ask: Ask, round_trip: float, request: Callable[[int], ProbeRequest]) -> float:
    loop, rate = asyncio.get_running_loop(), 0.0
    for size in SIZES:
        message = min(size // STREAMS, CHUNK_BYTES)
        began = loop.time()
        await asyncio.gather(*(ask(request(message)) for _ in range(size // message)))
        took = loop.time() - began
        rate = size / (took - round_trip if took > round_trip else took)
        if took - round_trip > LONG_ENOUGH:
            break
    return rate
