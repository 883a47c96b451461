"""The records that a site sends to the coordinator: training samples, rounds, links and log notes.

Records are kept until the coordinator confirms that it has stored them. The queue is bounded; the oldest records are
dropped first.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping

import psutil

from pier_node.base.units import printable
from pier_node.outer.state import OuterState
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.wire.links import SiteCarrier
from pier_proto.v1.coordinator_pb2 import LinkRecord, Note, Record, ReportRequest, RoundRecord, Sample
from pier_proto.v1.peer_pb2 import Phase

KEEP = 20_000
"""Records kept while the coordinator does not answer: about a day of samples and short rounds."""
BATCH = 200
"""Records in one report."""
BATCH_BYTES = 256 << 10
"""Bytes of the records in one report: the coordinator takes messages that are half as long again."""


class Reports:
    """A numbered queue of records.

    Attributes:
        dropped: records that were lost because the coordinator did not take them for too long.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self.dropped = 0
        self._stream = secrets.token_bytes(8)
        self._records: deque[Record] = deque()
        self._first, self._keep = 0, keep

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Queue a record; it is sent as soon as possible."""
        self._records.append(record)
        if len(self._records) > self._keep:
            self._records.popleft()
            self._first += 1
            self.dropped += 1

    def request(self, lease: bytes) -> ReportRequest:
        """A report of the oldest records."""
        records, size = list[Record](), 0
        for number in range(min(BATCH, len(self._records))):
            record = self._records[number]
            size += record.ByteSize()
            if records and size > BATCH_BYTES:
                break
            records.append(record)
        return ReportRequest(lease=lease, stream=self._stream, first=self._first, records=records, dropped=self.dropped)

    def stored(self, below: int) -> None:
        """Drop the records with smaller numbers: they are on the coordinator's disk."""
        while self._records and self._first < below:
            self._records.popleft()
            self._first += 1


LINE = 2000
"""Maximum length of a note, in characters."""
DEVICE = 200
"""Maximum length of what a site trains on, in characters."""
ENOUGH = 1_000_000
"""Bytes that a round must send for a bandwidth estimate; with fewer, latency dominates the time."""

AT_WORK = (Phase.PHASE_TRAINING, Phase.PHASE_WAITING)
"""Phases of a site that trains; in others its speed is that of an earlier time."""


def known(loss: float) -> float:
    """A loss as records have it: infinite ones, which the coordinator refuses, are not known either."""
    return loss if math.isfinite(loss) else math.nan


class Recorder:
    """Writes the records of one site into `reports`."""

    def __init__(self, reports: Reports, progress: Progress, carrier: SiteCarrier, roster: Roster) -> None:
        self.reports, self._progress, self._carrier, self._roster = reports, progress, carrier, roster
        self._compute, self._waited, self._sent = progress.compute, progress.waited, carrier.bytes_sent()
        self._sample = ""

    def round(self, state: OuterState, lines: Mapping[str, float] | None = None) -> Callable[[], None]:
        """Make the record of a round that is decided. What is returned adds it, when the state is on the disk.

        Its times are counted from the previous round.

        Args:
            lines: measured bandwidth to other sites, bytes per second, by node. None: assume that all bytes sent since
                the previous round were sent in this round's exchange.
        """
        progress, sent = self._progress, self._carrier.bytes_sent()
        compute, waited = progress.compute - self._compute, progress.waited - self._waited
        self._compute, self._waited = progress.compute, progress.waited
        times = progress.times.scaled_to(waited)
        fresh = progress.validated_round == state.round
        before, self._sample = self._sample, progress.sample
        record = RoundRecord(
            round=state.round,
            digest=state.digest,
            members=state.members,
            compute=compute,
            waiting=times.waiting,
            exchange=times.exchange,
            retry=times.retry,
            steps=progress.steps,
            inner_step=progress.inner_step,
            tokens=progress.tokens,
            bytes_sent=sent,
            loss=known(progress.loss),
            validation_loss=known(progress.validation_loss) if fresh else math.nan,
            sample=self._sample if self._sample != before else "",
        )
        count, self._sent = sent - self._sent, sent
        if lines is None:
            reached = count / progress.times.exchange if count >= ENOUGH and progress.times.exchange else 0.0
            lines = dict.fromkeys(state.members, reached)
        links = [self._link(node, lines.get(node, 0.0)) for node in state.members if node in self._roster.contacts]

        def add() -> None:
            for each in (Record(time=time.time(), round=record), *links):
                self.reports.add(each)

        return add

    def sample(self, memory: int, cpu: float = 0.0) -> None:
        """Record the current state of the training.

        Args:
            memory: in bytes, as `memory_held` returns it.
            cpu: fraction of the machine's cores that is busy; 0: not known.
        """
        progress = self._progress
        busy = progress.compute + progress.waited
        record = Sample(
            inner_step=progress.inner_step,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens_per_second if progress.phase in AT_WORK else 0.0,
            loss=known(progress.loss),
            utilisation=progress.compute / busy if busy else math.nan,
            bytes_sent=self._carrier.bytes_sent(),
            memory=memory,
            device="".join(it for it in progress.device.words[:DEVICE] if it.isprintable()),
            device_memory=progress.device.peak_bytes,
            mfu=mfu if math.isfinite(mfu := progress.device.mfu(progress.tokens_per_second)) else 0.0,
            cpu=cpu,
            gradient_norm=progress.gradient_norm if math.isfinite(progress.gradient_norm) else 0.0,
        )
        self.reports.add(Record(time=time.time(), sample=record))

    def link(self, peer: str, bandwidth: float) -> None:
        """Record the bandwidth to another site, in bytes per second, as it was just measured apart from rounds."""
        self._sent = self._carrier.bytes_sent()  # what that took was not sent in a round
        if peer in self._roster.contacts:  # it may be gone meanwhile
            self.reports.add(self._link(peer, bandwidth))

    def note(self, level: int, text: str) -> None:
        """Record something worth reading."""
        self.reports.add(Record(time=time.time(), note=Note(level=level, text=printable(text[:LINE]))))

    def _link(self, peer: str, bandwidth: float) -> Record:
        trip, sent = self._roster.contacts[peer].round_trip, self._carrier.bytes_sent_to(peer)
        link = LinkRecord(peer=peer, round_trip=trip, bandwidth=bandwidth, bytes_sent=sent)
        return Record(time=time.time(), link=link)


class Noting(logging.Handler):
    """Records what this site logs as notes: every warning, and other lines while few records wait to be sent."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Record it."""
        if record.levelno >= logging.WARNING or len(self._recorder.reports) < BATCH:
            self._recorder.note(record.levelno, record.getMessage())


def memory_held() -> int:
    """Resident memory of this daemon and its workers, in bytes. Blocks for some milliseconds."""
    total, own = 0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
