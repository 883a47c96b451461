"""The coordinator client: keeps a site in touch with its coordinator in the background for as long as the site runs.

The coordinator may be unreachable for days. Training continues, the client keeps records until it can send them, and it
retries with pauses that grow and are randomised, so that sites do not retry together.

Coordination is all that a site does with its coordinator, assembled for the daemon; CoordinatorClient does the talking.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from io import BufferedReader, BytesIO
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import psutil

from pier_node import __version__
from pier_node.base.errors import PierError
from pier_node.base.patience import Backoff
from pier_node.base.tasks import cancel_and_wait
from pier_node.base.units import amount
from pier_node.experts.resume import Kept
from pier_node.rounds.folder import SiteRecord
from pier_node.rounds.revocations import REVOKED, Revoked
from pier_node.rounds.roster import Roster
from pier_node.site.coordinator.expert_messages import experts
from pier_node.site.coordinator.link import DELIVERY, Link, NoLease, Refused, Unreachable
from pier_node.site.coordinator.records import Noting, Recorder, Reports, memory_held
from pier_node.site.loop import Orders
from pier_node.site.report import Reporter, naming
from pier_node.site.settings import Settings
from pier_node.wire.carrier import PROTOCOL, PeerLost
from pier_node.wire.files import PIECE, pieces_of
from pier_node.wire.links import SiteCarrier
from pier_proto.v1 import coordinator_pb2 as pb
from pier_proto.v1.peer_pb2 import Pulse, Site, WitnessReply, WitnessRequest

if TYPE_CHECKING:
    from pier_node.site.join import Membership

ANSWER = 10.0
"""Timeout of a request, in seconds."""
FLUSH = 2.0
"""Longest delay in seconds before a record is sent."""
GOODBYE = 1.0
"""Seconds that a stopping site allows for its last messages to the coordinator."""
JITTER = 0.5
"""Fraction of a pause that is random, so that sites that lost the coordinator together do not reconnect together."""

P = TypeVar("P", pb.DeliverRequest, pb.CheckpointPart)

log = logging.getLogger(__name__)


class CoordinatorClient:
    """The coordinator client of one site.

    Args:
        here: the site.
        orders: receives the operator's orders.
        reports: records to send.
        revoked: receives the list of revoked sites.
    """

    def __init__(self, link: Link, here: Coordination, orders: Orders, reports: Reports, revoked: Revoked) -> None:
        self._link, self._here, self._orders, self._reports, self._revoked = link, here, orders, reports, revoked
        self._lease = pb.RegisterReply()
        self._backoff = _retries()
        self._away = False
        self._flushed = 0.0

    async def enter(self, patience: float) -> pb.RegisterReply | None:
        """Register for the first time. `run` registers again once the site knows its own address.

        Returns:
            The coordinator's reply; None if there was no answer within `patience` seconds.

        Raises:
            PierError: the coordinator refuses this site.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._register()
        reply, self._lease = self._lease, pb.RegisterReply()
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
            self._lease = pb.RegisterReply()

    async def flush(self) -> None:
        """Send the stored records, as long as the coordinator answers; those that it does not want are left out."""
        while len(self._reports) and self._lease.lease:
            report = self._reports.request(self._lease.lease)
            try:
                reply = await self._link.report(report, ANSWER)
            except Refused as refused:  # of a site that it does not want it refuses the heartbeats, too
                self._reports.stored(report.first + len(report.records))
                log.warning("the coordinator does not take %d records of this site: %s", len(report.records), refused)
                break
            self._reports.stored(reply.stored)
        self._flushed = asyncio.get_running_loop().time()

    async def deliver(self, sheet: pb.ScoreSheet, content: bytes) -> None:
        """Send a score sheet. Returns once the coordinator has it, however long the coordinator is unreachable.

        Raises:
            Refused: the coordinator does not want it.
        """
        backoff = _retries()
        digest = hashlib.sha256(content).digest()

        async def send(lease: bytes, offset: int) -> None:
            about = pb.DeliverRequest(lease=lease, sheet=sheet, size=len(content), digest=digest, offset=offset)
            await self._link.deliver(_parts(about, BytesIO(content)), DELIVERY)

        while True:
            if self._lease.lease:
                try:
                    await self._resume(send, len(content), digest)
                    return
                except (NoLease, Unreachable) as problem:
                    log.info("score sheets wait: %s", problem)
            await asyncio.sleep(_spread(backoff.seconds()))

    async def ask_witness(self, request: WitnessRequest) -> WitnessReply:
        """Ask the coordinator, as the run's witness, for its vote. Raises PeerLost."""
        try:
            return await self._link.witness(request, ANSWER)
        except (NoLease, Refused, Unreachable) as problem:
            raise PeerLost("the coordinator", str(problem)) from problem

    async def give_checkpoint(self, plan: str, kept: Kept, file: BufferedReader) -> None:
        """Send the checkpoint in an open file to the coordinator. Raises NoLease, Refused, Unreachable."""

        async def send(lease: bytes, offset: int) -> None:
            about = pb.ExpertCheckpoint(job=kept.job, step=kept.step, size=kept.size, digest=kept.digest)
            first = pb.CheckpointPart(lease=lease, plan=plan, checkpoint=about, offset=offset)
            await self._link.give_checkpoint(_parts(first, file), kept.deadline)

        await self._resume(send, kept.size, bytes.fromhex(kept.digest))

    async def fetch_checkpoint(
        self, plan: str, kept: Kept, digest: str = "", offset: int = 0
    ) -> AsyncGenerator[pb.CheckpointPart]:
        """Yield the parts of the checkpoint that the coordinator now holds for a job: the one in `kept` or a later one.

        Args:
            digest, offset: this many bytes of the checkpoint with this digest (hex) are here. If the coordinator still
                has that one, it leaves them out and says so in the first part.

        Raises:
            NoLease, Refused, Unreachable: the coordinator no longer has it, or does not answer.
        """
        lease = self._leased()
        request = pb.FetchCheckpointRequest(lease=lease, plan=plan, job=kept.job, digest=digest, offset=offset)
        async with aclosing(self._link.fetch_checkpoint(request, kept.deadline)) as parts:
            async for part in parts:
                yield part

    async def close(self) -> None:
        """Send the remaining records and the final pulse, then disconnect.

        A coordinator that has just come back receives them too.
        """
        with suppress(NoLease, Refused, Unreachable, TimeoutError):
            async with asyncio.timeout(GOODBYE):
                if not self._lease.lease:
                    self._lease = await self._link.register(self._here.registration(), ANSWER)
                await self.flush()
                await self._link.heartbeat(self._heartbeat(), ANSWER)
        await self._link.close()

    async def _resume(self, send: Callable[[bytes, int], Awaitable[None]], size: int, digest: bytes) -> None:
        """Send a file with `send(lease, offset)`, from where its last transfer was interrupted.

        If the coordinator then refuses it, what it had of the file may have been damaged: it gets the whole file.

        Args:
            size, digest: of the whole file; the digest is its SHA-256.

        Raises:
            NoLease, Refused, Unreachable: the coordinator does not take it.
        """
        lease, offset = self._leased(), 0
        if size > PIECE:
            with suppress(Refused):  # an earlier version, which does not know the question
                offset = (await self._link.arrived(pb.ArrivedRequest(lease=lease, digest=digest), ANSWER)).offset
        if 0 < offset <= size:
            log.info("%s of %s are there already", amount(offset), amount(size))
            with suppress(Refused):
                await send(lease, offset)
                return
        await send(lease, 0)

    def _leased(self) -> bytes:
        if not self._lease.lease:
            raise Unreachable("the coordinator is away")
        return self._lease.lease

    def _heartbeat(self, paths: pb.Paths | None = None) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            lease=self._lease.lease,
            pulse=self._here.pulse(),
            order=self._orders.epoch,
            paths=paths,
            revocations=self._revoked.version,
        )

    async def _register(self) -> None:
        while True:
            try:
                self._lease = await self._link.register(self._here.registration(), ANSWER)
            except Refused as refused:
                raise _refused(refused) from refused
            except (NoLease, Unreachable) as problem:
                await self._missed(problem)
                continue
            self._heard()
            self._revoked.take(self._lease.revocations)
            self._here.meet(self._lease.roster)
            self._take(self._lease.order)
            return

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        told: pb.Paths | None = None
        while True:
            paths = self._here.paths()
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
        backoff = _retries()
        while True:
            try:
                async for order in self._link.watch(pb.WatchRequest(lease=lease)):
                    backoff = _retries()
                    self._take(order)
            except Unreachable:
                pass
            except (NoLease, Refused):
                return
            await asyncio.sleep(_spread(backoff.seconds()))

    def _take(self, order: pb.Order) -> None:
        if order.activity == pb.Order.ACTIVITY_STOP:
            log.info("the run's operator wants this site to leave")
            self._here.stop()
        kind = order.assignment.WhichOneof("kind")
        try:
            wanted = experts(order.assignment.expert) if kind == "expert" else None
        except PierError as error:
            log.error("an order of the coordinator cannot be followed: %s", error)
            return
        stage = order.assignment.stage.number if kind == "stage" else None
        self._orders.take(order.epoch, order.activity == pb.Order.ACTIVITY_PAUSE, wanted, stage)

    def _heard(self) -> None:
        if self._away:
            log.info("the coordinator is back")
        self._away, self._backoff = False, _retries()

    async def _missed(self, problem: Exception) -> None:
        if not self._away:
            log.warning("the coordinator does not answer; training continues without it: %s", problem)
        self._away = True
        await asyncio.sleep(_spread(self._backoff.seconds()))


async def _parts(first: P, file: BufferedReader | BytesIO) -> AsyncIterator[P]:
    """The messages that send a file, from `first.offset` on."""
    yield first
    async for piece in pieces_of(file, first.offset):
        yield type(first)(piece=piece)


def _retries() -> Backoff:
    """The pauses before a coordinator that does not answer is asked again."""
    return Backoff(first=0.25, last=30.0)


def _spread(seconds: float) -> float:
    return seconds * (1 - JITTER * random.random())


def _refused(refused: Refused) -> PierError:
    return PierError(
        f"the coordinator does not have this site in the run: {refused}",
        "If it was revoked, it comes back as another: with an empty --data folder, and a new invite.",
    )


SAMPLE = 10.0
"""Seconds between two samples of the training."""
PATIENCE = 3.0
"""Seconds that a site which already knows its peers waits for the coordinator before it continues without it."""
FOR_EVER = 1e9


class Coordination:
    """One site's dealings with its coordinator.

    Args:
        member: this site's membership; it must have an enrolment.
        stop: makes the site leave the run.

    Attributes:
        client: the connection to the coordinator.
        orders: the operator's orders for this site.
        revoked: the sites that were revoked from the run.
        reports: records to send.
        recorder: writes the records of this site.
    """

    def __init__(
        self,
        member: Membership,
        settings: Settings,
        reporter: Reporter,
        carrier: SiteCarrier,
        roster: Roster,
        stop: Callable[[], None],
    ) -> None:
        enrolment = member.enrolment
        assert enrolment is not None
        self.orders = Orders()
        self.revoked = Revoked(settings.folder, enrolment.authority.encode(), member.config.hash(), self._bar)
        self._reporter, self._carrier, self._roster = reporter, carrier, roster
        self._transport, self._workers, self._starting = member.transport, settings.workers, True
        self.stop = stop
        self.reports = Reports()
        self.recorder = Recorder(self.reports, reporter.progress, carrier, roster)
        link = Link(enrolment.address, enrolment.node, enrolment.credentials(member.identity))
        self.client = CoordinatorClient(link, self, self.orders, self.reports, self.revoked)
        self._noting = Noting(self.recorder)
        self._noting.addFilter(naming(roster.called))

    async def enter(self, record: SiteRecord | None) -> SiteRecord | None:
        """Register. Returns the site's own record, updated with what the coordinator knows of this site's place.

        From here on this site refuses all contact with the sites that it knows to be revoked.

        Raises:
            PierError: the coordinator refuses this site.
        """
        self.revoked.restore()
        logging.getLogger("pier_node").addHandler(self._noting)
        reply = await self.client.enter(PATIENCE if record else FOR_EVER)
        self._starting = False
        if reply is None:
            return record
        first = reply.founder == self._carrier.node
        place = record or SiteRecord(first, reply.slot, transport=self._transport)
        peers = {site.node: site for site in [*place.sites(), *reply.roster] if site.address}
        return replace(place, slot=reply.slot, founded_by=reply.founder).with_peers(peers.values())

    async def sample(self) -> None:
        """Sample the training periodically until cancelled, and how busy the cores were since the last sample."""
        while True:
            await self._sample()
            await asyncio.sleep(SAMPLE)

    async def _sample(self) -> None:
        self.recorder.sample(await asyncio.to_thread(memory_held), psutil.cpu_percent(None) / 100)

    async def close(
        self,
        _kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        _trace: TracebackType | None = None,
    ) -> None:
        """Send the remaining records, how the training stands in the end, and the error if one ends this site."""
        if not self._starting:
            await self._sample()
        if isinstance(error, PierError | OSError):
            self.recorder.note(logging.ERROR, f"pier-node ends here: {error}")
        logging.getLogger("pier_node").removeHandler(self._noting)
        await self.client.close()

    def registration(self) -> pb.RegisterRequest:
        """A registration with current values."""
        return pb.RegisterRequest(
            protocol=PROTOCOL,
            run_hash=self._reporter.config.hash(),
            site=self._reporter.site,
            transport=self._transport,
            version=__version__,
            workers=self._workers,
            time=time.time(),
            starting=self._starting,
        )

    def pulse(self) -> Pulse:
        """This site's current pulse."""
        return self._reporter.pulse()

    def paths(self) -> pb.Paths | None:
        """The latest paths that this site planned for a pipeline: the same object until there are new ones."""
        return self._reporter.paths()

    def meet(self, sites: Iterable[Site]) -> None:
        """Learn of the other sites of the run, as the coordinator knows them."""
        for site in sites:
            if site.address:
                self._roster.add(site)

    def _bar(self, nodes: Iterable[str]) -> None:
        self._roster.bar(nodes, REVOKED)
        self._carrier.refuse(nodes, REVOKED)
