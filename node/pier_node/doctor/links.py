"""Measures the link to a peer with Probe: round trip, clock difference, and bandwidth in each direction.

Data is sent as in a round: messages of up to 1 MiB, several at once over one connection. The amount grows until the
transfer takes long enough to be measured. So a slow line is not occupied for minutes, and a fast one is not mistaken
for its latency.
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
"""Bytes of successive tries, in each direction."""
LONG_ENOUGH = 0.5
"""Seconds that a try must take for its rate to be accepted; the last try is always accepted."""

Ask = Callable[[ProbeRequest], Awaitable[ProbeReply]]
"""Sends a probe to the peer. Raises PeerLost."""


@dataclass(frozen=True)
class Link:
    """The link to a peer.

    Attributes:
        round_trip: seconds.
        clock_ahead: seconds by which the peer's clock is ahead of this site's, to within half a round trip.
        up: bytes per second from this site to the peer.
        down: bytes per second from the peer to this site.
    """

    round_trip: float
    clock_ahead: float
    up: float
    down: float


async def measure(ask: Ask, clock: Callable[[], float] = time.time) -> Link:
    """Measure a link. Takes a few seconds and at most twice the sum of SIZES in bytes. Raises PeerLost."""
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
