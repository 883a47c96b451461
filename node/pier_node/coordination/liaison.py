"""The liaison: keeps a site in touch with its coordinator for as long as it runs, in the background.

The coordinator may be away for days. Training goes on, what there is to tell is kept, and the liaison asks again, with
pauses that grow and differ between sites.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress

from pier.v1.coordinator_pb2 import HeartbeatRequest, Order, RegisterReply, RegisterRequest, WatchRequest
from pier.v1.peer_pb2 import Pulse, Site
from pier_node.coordination.link import Link, NoLease, Refused, Unreachable
from pier_node.coordination.reports import Reports
from pier_node.errors import PierError
from pier_node.orders import Orders
from pier_node.outer.deadline import Backoff

ANSWER = 10.0
"""Seconds for an answer."""
FLUSH = 2.0
"""Seconds after which at the latest a record is sent on."""
JITTER = 0.5
"""Part of a pause that is up to chance: sites that lost the coordinator together do not come back together."""

log = logging.getLogger(__name__)


class Liaison:
    """One site's.

    Args:
        request: a registration, as things are now.
        pulse: what this site says of itself now.
        stop: told when the operator wants this site to leave the run.
        revoked: told the node ids that are not of the run any more.
        met: told of the other sites of the run, as the coordinator knows them.
    """

    def __init__(
        self,
        link: Link,
        request: Callable[[], RegisterRequest],
        pulse: Callable[[], Pulse],
        orders: Orders,
        reports: Reports,
        stop: Callable[[], None],
        revoked: Callable[[Iterable[str]], None],
        met: Callable[[Iterable[Site]], None],
    ) -> None:
        self._link, self._request, self._pulse = link, request, pulse
        self._orders, self._reports, self._stop = orders, reports, stop
        self._revoked, self._met = revoked, met
        self._lease = RegisterReply()
        self._backoff = Backoff(first=0.25, last=30.0)
        self._away = False
        self._flushed = 0.0

    async def enter(self, patience: float) -> RegisterReply | None:
        """Register for the first time; `run` does it again, when the site knows where it is reached.

        Returns:
            None: no answer for `patience` seconds.

        Raises:
            PierError: the coordinator refuses this site.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._register()
        reply, self._lease = self._lease, RegisterReply()
        return reply if reply.lease else None

    async def run(self) -> None:
        """Keep in touch, for ever. Raises PierError when the coordinator will not have this site any more."""
        while True:
            await self._register()
            watch = asyncio.create_task(self._watch(self._lease.lease))
            try:
                await self._beat()
            except NoLease:
                log.info("the coordinator does not know this start of the site: registering again")
            except Refused as refused:
                raise _refused(refused) from refused
            finally:
                watch.cancel()
                await asyncio.wait([watch])
            self._lease = RegisterReply()

    async def flush(self) -> None:
        """Send on what there is, as far as the coordinator answers."""
        while len(self._reports) and self._lease.lease:
            reply = await self._link.report(self._reports.request(self._lease.lease), ANSWER)
            self._reports.stored(reply.stored)
        self._flushed = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Tell what is left and how this site ends, and hang up."""
        with suppress(NoLease, Refused, Unreachable, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.flush()
                await self._link.heartbeat(self._heartbeat(), ANSWER)
        await self._link.close()

    def _heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(lease=self._lease.lease, pulse=self._pulse(), order=self._orders.epoch)

    async def _register(self) -> None:
        while True:
            try:
                self._lease = await self._link.register(self._request(), ANSWER)
            except Refused as refused:
                raise _refused(refused) from refused
            except (NoLease, Unreachable) as problem:
                await self._missed(problem)
                continue
            self._heard()
            self._met(self._lease.roster)
            self._take(self._lease.order)
            return

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                reply = await self._link.heartbeat(self._heartbeat(), ANSWER)
                self._heard()
                self._revoked(reply.revoked)
                if loop.time() - self._flushed >= FLUSH:
                    await self.flush()
            except Unreachable as problem:
                await self._missed(problem)
                continue
            await asyncio.sleep(max(self._lease.heartbeat_seconds, 0.1))

    async def _watch(self, lease: bytes) -> None:
        """Take orders as they come; heartbeats find out whether the lease still holds."""
        backoff = Backoff(first=0.25, last=30.0)
        while True:
            try:
                async for order in self._link.watch(WatchRequest(lease=lease)):
                    self._take(order)
            except Unreachable:
                pass
            except (NoLease, Refused):
                return
            await asyncio.sleep(_spread(backoff.seconds()))

    def _take(self, order: Order) -> None:
        if order.activity == Order.ACTIVITY_STOP:
            log.info("the run's operator wants this site to leave")
            self._stop()
        kind = order.assignment.WhichOneof("kind") or "replica"
        self._orders.take(order.epoch, order.activity == Order.ACTIVITY_PAUSE, kind)

    def _heard(self) -> None:
        if self._away:
            log.info("the coordinator is back")
        self._away, self._backoff = False, Backoff(first=0.25, last=30.0)

    async def _missed(self, problem: Exception) -> None:
        if not self._away:
            log.warning("the coordinator does not answer; training goes on without it: %s", problem)
        self._away = True
        await asyncio.sleep(_spread(self._backoff.seconds()))


def _spread(seconds: float) -> float:
    return seconds * (1 - JITTER * random.random())


def _refused(refused: Refused) -> PierError:
    return PierError(
        f"the coordinator does not have this site in the run: {refused}",
        "If it was revoked, it comes back as another: with an empty --data folder, and a new invite.",
    )
