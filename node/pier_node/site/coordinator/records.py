"""What a site tells the coordinator of itself: samples of its training, its rounds, its links, what it logs.

What a site has to tell the coordinator, kept until it says that it has stored it; bounded, the oldest goes first.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Mapping

import psutil

from pier_node.outer.state import OuterState
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.wire.transport import SiteCarrier
from pier_proto.v1.coordinator_pb2 import LinkRecord, Note, Record, ReportRequest, RoundRecord, Sample

KEEP = 20_000
"""Records that are kept while the coordinator does not answer: about a day of samples and short rounds."""
BATCH = 200
"""Records of one report."""


class Reports:
    """A numbered sequence of records.

    Attributes:
        dropped: records that were lost, because nobody took them for too long.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self.dropped = 0
        self._stream = secrets.token_bytes(8)
        self._records: deque[Record] = deque()
        self._first, self._keep = 0, keep

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Tell this when there is a chance."""
        self._records.append(record)
        if len(self._records) > self._keep:
            self._records.popleft()
            self._first += 1
            self.dropped += 1

    def request(self, lease: bytes) -> ReportRequest:
        """The oldest of them."""
        records = [self._records[number] for number in range(min(BATCH, len(self._records)))]
        return ReportRequest(lease=lease, stream=self._stream, first=self._first, records=records, dropped=self.dropped)

    def stored(self, below: int) -> None:
        """Everything with a smaller number is on the coordinator's disk."""
        while self._records and self._first < below:
            self._records.popleft()
            self._first += 1


LINE = 2000
"""Most letters of a note."""
ENOUGH = 1_000_000
"""Bytes sent in a round that say how fast a line is; the time of fewer is that of messages, not of their bytes."""


class Recorder:
    """Writes records of one site."""

    def __init__(self, reports: Reports, progress: Progress, carrier: SiteCarrier, roster: Roster) -> None:
        self._reports, self._progress, self._carrier, self._roster = reports, progress, carrier, roster
        self._compute, self._waited, self._sent = progress.compute, progress.waited, 0

    def round(self, state: OuterState, lines: Mapping[str, float] | None = None) -> None:
        """A round was committed here; its times are those since the last one.

        Args:
            lines: bytes a second to other sites, where measured; None: all that was sent was sent in the exchange.
        """
        progress, sent = self._progress, self._carrier.bytes_sent()
        compute, waited = progress.compute - self._compute, progress.waited - self._waited
        self._compute, self._waited = progress.compute, progress.waited
        times = progress.times.scaled_to(waited)
        fresh = progress.validated_round == state.round
        record = RoundRecord(
            round=state.round,
            digest=state.digest,
            members=state.members,
            compute=compute,
            waiting=times.waiting,
            exchange=times.exchange,
            retry=times.retry,
            steps=progress.steps,
            tokens=progress.tokens,
            bytes_sent=sent,
            loss=progress.loss if math.isfinite(progress.loss) else math.nan,
            validation_loss=progress.validation_loss if fresh else math.nan,
        )
        self._reports.add(Record(time=time.time(), round=record))
        count, self._sent = sent - self._sent, sent
        if lines is None:
            reached = count / progress.times.exchange if count >= ENOUGH and progress.times.exchange else 0.0
            lines = dict.fromkeys(state.members, reached)
        for node in state.members:
            self._link(node, lines.get(node, 0.0))

    def sample(self, memory: int) -> None:
        """How the training goes now; `memory` as `memory_held` says."""
        progress = self._progress
        busy = progress.compute + progress.waited
        record = Sample(
            inner_step=progress.inner_step,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens_per_second,
            loss=progress.loss if math.isfinite(progress.loss) else math.nan,
            utilisation=progress.compute / busy if busy else math.nan,
            bytes_sent=self._carrier.bytes_sent(),
            memory=memory,
        )
        self._reports.add(Record(time=time.time(), sample=record))

    def note(self, level: int, text: str) -> None:
        """Something worth reading."""
        self._reports.add(Record(time=time.time(), note=Note(level=level, text=text[:LINE])))

    def _link(self, peer: str, bandwidth: float) -> None:
        contact = self._roster.contacts.get(peer)
        if contact is None:
            return
        sent = self._carrier.bytes_sent_to(peer)
        link = LinkRecord(peer=peer, round_trip=contact.round_trip, bandwidth=bandwidth, bytes_sent=sent)
        self._reports.add(Record(time=time.time(), link=link))


class Noting(logging.Handler):
    """Makes a note of every warning that this site logs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Note it."""
        self._recorder.note(record.levelno, record.getMessage())


def memory_held() -> int:
    """Bytes that this daemon and its workers hold. Blocks for some milliseconds."""
    total, own = 0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
