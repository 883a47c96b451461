"""Everything that a site does with its coordinator, assembled for the daemon."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from io import BufferedReader
from types import TracebackType
from typing import TYPE_CHECKING

from pier_node import __version__
from pier_node.base.errors import PierError
from pier_node.experts.resume import Kept
from pier_node.outer.state import OuterState
from pier_node.rounds.folder import SiteRecord
from pier_node.rounds.revocations import REVOKED, Revoked
from pier_node.rounds.roster import Roster
from pier_node.site.coordinator.client import CoordinatorClient
from pier_node.site.coordinator.link import Link
from pier_node.site.coordinator.records import Noting, Recorder, Reports, memory_held
from pier_node.site.orders import Orders
from pier_node.site.report import Names, Reporter
from pier_node.site.settings import Settings
from pier_node.wire.carrier import PROTOCOL, SiteCarrier
from pier_proto.v1.coordinator_pb2 import CheckpointPart, Record, RegisterRequest, ScoreSheet
from pier_proto.v1.peer_pb2 import Site

if TYPE_CHECKING:
    from pier_node.site.join import Membership

SAMPLE = 10.0
"""Seconds between two samples of the training."""
PATIENCE = 10.0
"""Seconds that a site which already knows its peers waits for the coordinator before it continues without it."""
FOR_EVER = 1e9


class Coordination:
    """One site's dealings with its coordinator.

    Args:
        member: this site's membership; it must have an enrolment.
        stop: makes the site leave the run.

    Attributes:
        orders: the operator's orders for this site.
        revoked: the sites that were revoked from the run.
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
        reports = self._reports = Reports()
        self._recorder = Recorder(reports, reporter.progress, carrier, roster)
        link = Link(enrolment.address, enrolment.node, enrolment.credentials(member.identity))
        told = self._request, reporter.pulse, lambda: reporter.paths()
        self._client = CoordinatorClient(link, *told, self.orders, reports, stop, self.revoked, self._meet)
        self._noting = Noting(self._recorder)
        self._noting.addFilter(Names(roster.called))

    async def enter(self, record: SiteRecord | None) -> SiteRecord | None:
        """Register. Returns the site's own record, updated with what the coordinator knows of this site's place.

        From here on this site refuses all contact with the sites that it knows to be revoked.

        Raises:
            PierError: the coordinator refuses this site.
        """
        self.revoked.restore()
        logging.getLogger("pier_node").addHandler(self._noting)
        reply = await self._client.enter(PATIENCE if record else FOR_EVER)
        self._starting = False
        if reply is None:
            return record
        first = reply.founder == self._carrier.node
        place = record or SiteRecord(first, reply.slot, transport=self._transport)
        peers = {site.node: site for site in [*place.sites(), *reply.roster] if site.address}
        return replace(place, slot=reply.slot, founded_by=reply.founder).with_peers(peers.values())

    async def run(self) -> None:
        """Stay in touch until cancelled. Raises PierError when the coordinator no longer accepts this site."""
        await self._client.run()

    async def sample(self) -> None:
        """Sample the training periodically until cancelled."""
        while True:
            self._recorder.sample(await asyncio.to_thread(memory_held))
            await asyncio.sleep(SAMPLE)

    def tell(self, record: Record) -> None:
        """Queue a record; it is sent as soon as possible."""
        self._reports.add(record)

    async def deliver(self, sheet: ScoreSheet, content: bytes) -> None:
        """Send a score sheet; see CoordinatorClient. Raises Refused."""
        await self._client.deliver(sheet, content)

    async def give_checkpoint(self, plan: str, kept: Kept, file: BufferedReader) -> None:
        """Send a checkpoint of an expert to the coordinator. Raises NoLease, Refused, Unreachable."""
        await self._client.give_checkpoint(plan, kept, file)

    def fetch_checkpoint(self, plan: str, kept: Kept) -> AsyncGenerator[CheckpointPart]:
        """Yield the coordinator's checkpoint of a job; see CoordinatorClient. Raises NoLease, Refused, Unreachable."""
        return self._client.fetch_checkpoint(plan, kept)

    def committed(self, state: OuterState, lines: Mapping[str, float] | None = None) -> None:
        """Record that a round was committed here; `lines` as in Recorder.round."""
        self._recorder.round(state, lines)

    async def close(
        self,
        _kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        _trace: TracebackType | None = None,
    ) -> None:
        """Send the remaining records and, if an error ends this site, a note of that error; then disconnect."""
        if isinstance(error, PierError | OSError):
            self._recorder.note(logging.ERROR, f"pier-node ends here: {error}")
        logging.getLogger("pier_node").removeHandler(self._noting)
        await self._client.close()

    def _request(self) -> RegisterRequest:
        return RegisterRequest(
            protocol=PROTOCOL,
            run_hash=self._reporter.config.hash(),
            site=self._reporter.site,
            transport=self._transport,
            version=__version__,
            workers=self._workers,
            time=time.time(),
            starting=self._starting,
        )

    def _meet(self, sites: Iterable[Site]) -> None:
        for site in sites:
            if site.address:
                self._roster.add(site)

    def _bar(self, nodes: Iterable[str]) -> None:
        self._roster.bar(nodes, REVOKED)
        self._carrier.refuse(nodes, REVOKED)
