"""What a site has to tell the coordinator, kept until it says that it has stored it; bounded, the oldest goes first."""

from __future__ import annotations

import secrets
from collections import deque

from pier.v1.coordinator_pb2 import Record, ReportRequest

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
