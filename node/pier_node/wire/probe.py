"""Probe, the answering side: what `pier-node doctor` at another site measures the way to this one with.

It asks for bytes, for the time, and whether this node reaches an address. All askers together get ALLOWANCE bytes and
CALL_BACKS attempts at once, so that nobody slows the training of this site down for long, or uses it to knock at doors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pier.v1.peer_pb2 import HelloRequest, ProbeReply, ProbeRequest, Site
from pier_node.wire.carrier import CHUNK_BYTES, PROBE, PROTOCOL, BadMessage, Carrier, PeerLost

ALLOWANCE = 256 << 20
"""Bytes that may be asked for, or sent here, in a minute."""
CALL_BACKS = 4
CALL_BACK_BYTES = 1 << 20
"""What a call back counts for."""
CALL_BACK_TIMEOUT = 8.0


class Allowance:
    """`limit` bytes in a minute: what is spent comes back evenly.

    Args:
        clock: seconds, from any beginning.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        self._left, self._at = float(limit), clock()

    def spend(self, size: int) -> None:
        """Raise BadMessage, saying when to come again, if so many are not left."""
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
        run_hash: of the run's configuration.
        clock: this site's clock, seconds since the epoch.
    """

    def __init__(self, carrier: Carrier, run_hash: bytes, clock: Callable[[], float] = time.time) -> None:
        self._carrier, self._run_hash, self._clock = carrier, run_hash, clock
        self._noise = os.urandom(CHUNK_BYTES)  # a line that compresses shall not look faster than it is
        self._allowance = Allowance(ALLOWANCE, time.monotonic)
        self._calling = 0
        carrier.serve(PROBE, self._answer)

    async def _answer(self, sender: str, request: ProbeRequest) -> ProbeReply:
        size = len(request.padding) + request.reply_size
        self._allowance.spend(size + (CALL_BACK_BYTES if request.call_back else 0))
        reply = ProbeReply(padding=self._noise[: request.reply_size], time=self._clock())
        if request.call_back:
            reply.detail = await self._problem_with(request.call_back, sender)
            reply.reached = not reply.detail
        return reply

    async def _problem_with(self, address: str, wanted: str) -> str:
        """Why the node `wanted` is not reached at an address; "": it is."""
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
