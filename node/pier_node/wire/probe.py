"""Probe: a site measures its link to another, which answers it.

Round trip, clock difference, and bandwidth in each direction. Data is sent as in a round: messages of up to 1 MiB,
several at once over one connection. The amount grows until the transfer takes long enough to be measured. So a slow
line is not occupied for minutes, and a fast one is not mistaken for its latency.

The other site also asks whether this node reaches an address. All askers together get ALLOWANCE
bytes per minute and CALL_BACKS attempts at once, so that nobody slows this site's training down for long. A call goes
back only to the asker's own host: to the address that the roster has for it, or to the host that it calls from. So
nobody can use this site to probe other hosts, least of all those of its own network.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address

from pier_node.base.address import format_address, is_address, parse_address
from pier_node.wire.addresses import are_routes, parse_routes
from pier_node.wire.carrier import CHUNK_BYTES, PROBE, PROTOCOL, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import HelloRequest, ProbeReply, ProbeRequest, Site

ALLOWANCE = 256 << 20
"""Bytes that may be asked for, or sent here, per minute."""
CALL_BACKS = 4
CALL_BACK_BYTES = 1 << 20
"""Bytes that a call back counts for."""
CALL_BACK_TIMEOUT = 8.0
LOOK_UP = 3.0
"""Seconds for looking up a host name."""


class Allowance:
    """`limit` bytes per minute: what is spent comes back at an even rate.

    Args:
        clock: returns seconds since any fixed time.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        self._left, self._at = float(limit), clock()

    def spend(self, size: int) -> None:
        """Spend `size` bytes. If too few are left, raise BadMessage, which says when to ask again."""
        now = self._clock()
        self._left = min(self._limit, self._left + (now - self._at) * self._limit / 60)
        self._at = now
        if size > self._left:
            wait = (size - self._left) * 60 / self._limit
            raise BadMessage(f"this node has been measured enough for now: ask again in {wait:.0f} s")
        self._left -= size


class ProbeServer:
    """Answers Probe on a carrier.

    Args:
        known: returns the address that the roster has for a node; "" if none.
        clock: returns this site's time in seconds since the epoch.
    """

    def __init__(
        self,
        carrier: Carrier,
        run_hash: bytes,
        known: Callable[[str], str] = lambda _: "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._carrier, self._run_hash, self._known, self._clock = carrier, run_hash, known, clock
        self._noise = os.urandom(CHUNK_BYTES)  # incompressible: a link that compresses must not look faster than it is
        self._allowance = Allowance(ALLOWANCE, time.monotonic)
        self._calling = 0
        carrier.serve(PROBE, self._answer)

    async def _answer(self, sender: str, request: ProbeRequest) -> ProbeReply:
        size = len(request.padding) + request.reply_size
        self._allowance.spend(size + (CALL_BACK_BYTES if request.call_back else 0))
        reply = ProbeReply(padding=self._noise[: request.reply_size], time=self._clock())
        if not request.call_back:
            return reply
        if at := await self._at(request, sender):
            reply.detail = await self._problem_with(at, sender)
            reply.reached = not reply.detail
        else:
            reply.declined = True
            reply.detail = (
                f"it does not try {request.call_back}: the call came from {request.seen_as or 'behind a relay'}, and "
                "it has not met this site at that address"
            )
        return reply

    async def _at(self, request: ProbeRequest, sender: str) -> str:
        """Where to call back, with host names resolved; "" if that may not be the caller's host."""
        if request.call_back == self._known(sender):
            return request.call_back
        if not is_address(request.seen_as):
            return ""
        seen, _ = parse_address(request.seen_as)
        if not are_routes(request.call_back):
            host, port = parse_address(request.call_back)
            return format_address(seen, port) if await _is_at(host, seen) else ""
        routes = parse_routes(request.call_back)
        for route in routes:
            if route.relay or not await _is_at(route.host, seen):
                return ""
        return ",".join(str(replace(route, host=seen)) for route in routes)

    async def _problem_with(self, address: str, wanted: str) -> str:
        """Why the node `wanted` is not reached at an address; "" if it is."""
        if self._calling >= CALL_BACKS:
            raise BadMessage("this node calls others back already: ask again in a few seconds")
        request = HelloRequest(protocol=PROTOCOL, run_hash=self._run_hash, site=Site(node=self._carrier.node))
        self._calling += 1
        try:
            reply = await self._carrier.greet(address, request, CALL_BACK_TIMEOUT)
        except PeerLost as lost:
            return lost.reason
        finally:
            self._calling -= 1
        return "" if reply.site.node == wanted else f"{address}: another node answers there, {reply.site.node}"


async def _is_at(host: str, seen: str) -> bool:
    """Whether a host, given by address or name, is at an address."""
    wanted, loop = _plain(seen), asyncio.get_running_loop()
    try:
        return _plain(host) == wanted
    except ValueError:
        pass
    try:
        async with asyncio.timeout(LOOK_UP):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return False
    return any(_plain(str(address[0])) == wanted for *_, address in found)


def _plain(host: str) -> IPv4Address | IPv6Address:
    """An address, as IPv4 even if it is written as IPv6. Raises ValueError if it is a name."""
    address = ip_address(host)
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


ANSWER = 30.0
"""Timeout of a probe, in seconds: 64 KiB on a line of 20 kbit/s, or a failing call back."""
PINGS = 5
STREAMS = 4
SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24))
"""Bytes of successive tries, in each direction."""
LONG_ENOUGH = 0.5
"""Seconds that a try must take for its rate to be accepted; the last try is always accepted."""

Ask = Callable[[ProbeRequest], Awaitable[ProbeReply]]
"""Sends a probe to the peer. Raises PeerLost."""


@dataclass(frozen=True)
class LinkSpeed:
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


def asking(carrier: Carrier, node: str) -> Ask:
    """Probes of a peer."""
    return lambda request: carrier.call(node, PROBE, request, ANSWER)


async def measure(ask: Ask, clock: Callable[[], float] = time.time, sizes: Sequence[int] = SIZES) -> LinkSpeed:
    """Measure a link. Takes a few seconds and at most twice the sum of `sizes` in bytes. Raises PeerLost."""
    round_trip, clock_ahead = min([await _ping(ask, clock) for _ in range(PINGS)])
    noise = os.urandom(CHUNK_BYTES)
    up = await _rate(ask, round_trip, sizes, lambda size: ProbeRequest(padding=noise[:size]))
    down = await _rate(ask, round_trip, sizes, lambda size: ProbeRequest(reply_size=size))
    return LinkSpeed(round_trip, clock_ahead, up, down)


async def _ping(ask: Ask, clock: Callable[[], float]) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    began, at = loop.time(), clock()
    reply = await ask(ProbeRequest())
    round_trip = loop.time() - began
    return round_trip, reply.time - (at + round_trip / 2)


async def _rate(ask: Ask, round_trip: float, sizes: Sequence[int], request: Callable[[int], ProbeRequest]) -> float:
    loop, rate = asyncio.get_running_loop(), 0.0
    for size in sizes:
        message = min(size // STREAMS, CHUNK_BYTES)
        began = loop.time()
        await asyncio.gather(*(ask(request(message)) for _ in range(size // message)))
        took = loop.time() - began
        rate = size / (took - round_trip if took > round_trip else took)
        if took - round_trip > LONG_ENOUGH:
            break
    return rate
