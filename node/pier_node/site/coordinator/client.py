"""The coordinator client: keeps a site in touch with its coordinator in the background for as long as the site runs.

The coordinator may be unreachable for days. Training continues, the client keeps records until it can send them, and it
retries with pauses that grow and are randomised, so that sites do not retry together.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, suppress
from io import BufferedReader, BytesIO

from pier_node.base.errors import PierError
from pier_node.base.tasks import cancel_and_wait
from pier_node.experts.resume import Kept
from pier_node.outer.deadline import Backoff
from pier_node.rounds.revocations import Revoked
from pier_node.site.coordinator.expert_messages import experts
from pier_node.site.coordinator.link import Link, NoLease, Refused, Unreachable
from pier_node.site.coordinator.records import Reports
from pier_node.site.orders import Orders
from pier_node.wire.files import pieces_of
from pier_proto.v1.coordinator_pb2 import (
    CheckpointPart,
    DeliverRequest,
    ExpertCheckpoint,
    FetchCheckpointRequest,
    HeartbeatRequest,
    Order,
    Paths,
    RegisterReply,
    RegisterRequest,
    ScoreSheet,
    WatchRequest,
)
from pier_proto.v1.peer_pb2 import Pulse, Site

ANSWER = 10.0
"""Timeout of a request, in seconds."""
FLUSH = 2.0
"""Longest delay in seconds before a record is sent."""
DELIVERY = 300.0
"""Timeout of delivering a score sheet, in seconds."""
FAREWELL = 1.0
"""Seconds that a stopping site allows for its last messages to the coordinator."""
JITTER = 0.5
"""Fraction of a pause that is random, so that sites that lost the coordinator together do not reconnect together."""

log = logging.getLogger(__name__)


class CoordinatorClient:
    """The coordinator client of one site.

    Args:
        request: returns a registration with current values.
        pulse: returns this site's current pulse.
        paths: returns the latest paths that this site planned for a pipeline, or None if it planned none. It returns
            the same object until there are new paths.
        stop: called when the operator wants this site to leave the run.
        revoked: receives the list of revoked sites.
        met: called with the other sites of the run, as the coordinator knows them.
    """

    def __init__(
        self,
        link: Link,
        request: Callable[[], RegisterRequest],
        pulse: Callable[[], Pulse],
        paths: Callable[[], Paths | None],
        orders: Orders,
        reports: Reports,
        stop: Callable[[], None],
        revoked: Revoked,
        met: Callable[[Iterable[Site]], None],
    ) -> None:
        self._link, self._request, self._pulse, self._paths = link, request, pulse, paths
        self._orders, self._reports, self._stop = orders, reports, stop
        self._revoked, self._met = revoked, met
        self._lease = RegisterReply()
        self._backoff = Backoff(first=0.25, last=30.0)
        self._away = False
        self._flushed = 0.0

    async def enter(self, patience: float) -> RegisterReply | None:
        """Register for the first time. `run` registers again once the site knows its own address.

        Returns:
            The coordinator's reply; None if there was no answer within `patience` seconds.

        Raises:
            PierError: the coordinator refuses this site.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._register()
        reply, self._lease = self._lease, RegisterReply()
        return reply if reply.lease else None

    async def run(self) -> None:
        """Stay in touch until cancelled. Raises PierError when the coordinator no longer accepts this site."""
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
                await cancel_and_wait(watch)
            self._lease = RegisterReply()

    async def flush(self) -> None:
        """Send the stored records, as long as the coordinator answers."""
        while len(self._reports) and self._lease.lease:
            reply = await self._link.report(self._reports.request(self._lease.lease), ANSWER)
            self._reports.stored(reply.stored)
        self._flushed = asyncio.get_running_loop().time()

    async def deliver(self, sheet: ScoreSheet, content: bytes) -> None:
        """Send a score sheet. Returns once the coordinator has it, however long the coordinator is unreachable.

        Raises:
            Refused: the coordinator does not want it.
        """
        backoff = Backoff(first=0.25, last=30.0)
        while True:
            if lease := self._lease.lease:
                try:
                    await self._link.deliver(_pieces(lease, sheet, content), DELIVERY)
                    return
                except (NoLease, Unreachable) as problem:
                    log.info("score sheets wait: %s", problem)
            await asyncio.sleep(_spread(backoff.seconds()))

    async def give_checkpoint(self, plan: str, kept: Kept, file: BufferedReader) -> None:
        """Send the checkpoint in an open file to the coordinator. Raises NoLease, Refused, Unreachable."""
        await self._link.give_checkpoint(_parts(self._leased(), plan, kept, file), kept.deadline)

    async def fetch_checkpoint(self, plan: str, kept: Kept) -> AsyncGenerator[CheckpointPart]:
        """Yield the parts of the checkpoint that the coordinator now holds for a job: the one in `kept` or a later one.

        Raises:
            NoLease, Refused, Unreachable: the coordinator no longer has it, or does not answer.
        """
        request = FetchCheckpointRequest(lease=self._leased(), plan=plan, job=kept.job)
        async with aclosing(self._link.fetch_checkpoint(request, kept.deadline)) as parts:
            async for part in parts:
                yield part

    async def close(self) -> None:
        """Send the remaining records and the final pulse, then disconnect.

        A coordinator that has just come back receives them too.
        """
        with suppress(NoLease, Refused, Unreachable, TimeoutError):
            async with asyncio.timeout(FAREWELL):
                if not self._lease.lease:
                    self._lease = await self._link.register(self._request(), ANSWER)
                await self.flush()
                await self._link.heartbeat(self._heartbeat(), ANSWER)
        await self._link.close()

    def _leased(self) -> bytes:
        if not self._lease.lease:
            raise Unreachable("the coordinator is away")
        return self._lease.lease

    def _heartbeat(self, paths: Paths | None = None) -> HeartbeatRequest:
        return HeartbeatRequest(
            lease=self._lease.lease,
            pulse=self._pulse(),
            order=self._orders.epoch,
            paths=paths,
            revocations=self._revoked.version,
        )

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
            self._revoked.take(self._lease.revocations)
            self._met(self._lease.roster)
            self._take(self._lease.order)
            return

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        told: Paths | None = None
        while True:
            paths = self._paths()
            try:
                reply = await self._link.heartbeat(self._heartbeat(None if paths is told else paths), ANSWER)
                told = paths
                self._heard()
                self._revoked.take(reply.revocations)
                if loop.time() - self._flushed >= FLUSH:
                    await self.flush()
            except Unreachable as problem:
                told = None  # the next answer may come from a restarted coordinator
                await self._missed(problem)
                continue
            await asyncio.sleep(max(self._lease.heartbeat_seconds, 0.1))

    async def _watch(self, lease: bytes) -> None:
        """Receive orders as they arrive. Heartbeats detect whether the lease is still valid."""
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
        try:
            wanted = experts(order.assignment.expert) if kind == "expert" else None
        except PierError as error:
            log.error("an order of the coordinator cannot be followed: %s", error)
            return
        stage = order.assignment.stage.number if kind == "stage" else None
        self._orders.take(order.epoch, order.activity == Order.ACTIVITY_PAUSE, kind, wanted, stage)

    def _heard(self) -> None:
        if self._away:
            log.info("the coordinator is back")
        self._away, self._backoff = False, Backoff(first=0.25, last=30.0)

    async def _missed(self, problem: Exception) -> None:
        if not self._away:
            log.warning("the coordinator does not answer; training goes on without it: %s", problem)
        self._away = True
        await asyncio.sleep(_spread(self._backoff.seconds()))


async def _pieces(lease: bytes, sheet: ScoreSheet, content: bytes) -> AsyncIterator[DeliverRequest]:
    yield DeliverRequest(lease=lease, sheet=sheet, size=len(content), digest=hashlib.sha256(content).digest())
    async for piece in pieces_of(BytesIO(content)):
        yield DeliverRequest(piece=piece)


async def _parts(lease: bytes, plan: str, kept: Kept, file: BufferedReader) -> AsyncIterator[CheckpointPart]:
    about = ExpertCheckpoint(job=kept.job, step=kept.step, size=kept.size, digest=kept.digest)
    yield CheckpointPart(lease=lease, plan=plan, checkpoint=about)
    async for piece in pieces_of(file):
        yield CheckpointPart(piece=piece)


def _spread(seconds: float) -> float:
    return seconds * (1 - JITTER * random.random())


def _refused(refused: Refused) -> PierError:
    return PierError(
        f"the coordinator does not have this site in the run: {refused}",
        "If it was revoked, it comes back as another: with an empty --data folder, and a new invite.",
    )
