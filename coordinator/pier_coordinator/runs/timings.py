"""How the time of rounds was spent: in parts for each site's last rounds, and in sums for all rounds of the run.

Sums are kept for buckets of rounds. When there are too many buckets, their width doubles.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pier_coordinator.runs.series import rounded
from pier_coordinator.store.facts import amount, whole

PARTS = ("compute", "waiting", "exchange", "retry")
LATEST = 200
"""Number of rounds of a site of which all parts are kept."""

BUCKETS = 400
"""Maximum number of buckets for all rounds of a run."""


class Segment(NamedTuple):
    """A round of one site: its end (seconds since the epoch), its parts in seconds, and the bytes sent until then."""

    round: float
    end: float
    compute: float
    waiting: float
    exchange: float
    retry: float
    bytes_sent: float

    @property
    def duration(self) -> float:
        """Duration of the round, in seconds."""
        return self.compute + self.waiting + self.exchange + self.retry

    @property
    def busy(self) -> float:
        """Seconds for which the others may have had to wait: all parts except waiting."""
        return self.duration - self.waiting


WIDE = len(Segment._fields)
BUSY = [Segment._fields.index(part) for part in PARTS if part != "waiting"]


class Segments:
    """The last rounds of one site, packed, since a thousand sites have 200,000 of them."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // WIDE

    def add(self, segment: Segment) -> None:
        """Insert a round in order; when there are too many, the earliest is dropped."""
        at = len(self._numbers)
        while at and self._numbers[at - WIDE] > segment.round:
            at -= WIDE
        self._numbers[at:at] = array("d", segment)
        if len(self) > LATEST:
            del self._numbers[:WIDE]

    def last(self, count: int = LATEST) -> list[Segment]:
        """The last `count` rounds, in order."""
        return self._rows(max(0, len(self) - count), len(self))

    def between(self, first: int, last: int) -> list[Segment]:
        """The rounds first .. last."""
        return self._rows(*self._places(first, last))

    def busy(self, first: int, last: int) -> float:
        """The mean busy time in rounds first .. last, in seconds; 0 if there are none."""
        begin, end = self._places(first, last)
        part = self._numbers[begin * WIDE : end * WIDE]
        return sum(sum(part[at::WIDE]) for at in BUSY) / (end - begin) if part else 0.0

    def _places(self, first: int, last: int) -> tuple[int, int]:
        rounds = self._numbers[::WIDE]
        return bisect_left(rounds, first), bisect_right(rounds, last)

    def _rows(self, begin: int, end: int) -> list[Segment]:
        return [Segment(*self._numbers[at * WIDE : (at + 1) * WIDE]) for at in range(begin, end)]


def segment_of(time: float, body: Mapping[str, Any]) -> Segment | None:
    """The segment of a round's fact; None if the fact does not say which round."""
    number = whole(body, "round")
    if number is None:
        return None
    compute, waiting, exchange, retry = (amount(body, part) for part in PARTS)
    return Segment(number, time, compute, waiting, exchange, retry, amount(body, "bytes_sent"))


@dataclass
class Bucket:
    """Rounds first .. first + width - 1 of all sites."""

    first: int
    stamp: int = 0
    records: int = 0
    compute: float = 0.0
    waiting: float = 0.0
    exchange: float = 0.0
    retry: float = 0.0
    longest: float = 0.0
    busiest: float = -1.0
    slowest: str = ""

    def take(self, segment: Segment, node: str) -> None:
        """Add a site's round."""
        self.records += 1
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(segment, part))
        self.longest = max(self.longest, segment.duration)
        if segment.busy > self.busiest:
            self.busiest, self.slowest = segment.busy, node

    def merge(self, other: Bucket) -> None:
        """Add another bucket."""
        self.records += other.records
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(other, part))
        self.longest = max(self.longest, other.longest)
        if other.busiest > self.busiest:
            self.busiest, self.slowest = other.busiest, other.slowest

    def row(self) -> dict[str, Any]:
        """The bucket for JSON: means per record, the longest duration, and the site that was busy longest."""
        means = {part: rounded(getattr(self, part) / self.records) for part in PARTS}
        return {"first": self.first, **means, "longest": rounded(self.longest), "slowest": self.slowest}


class RoundTimings:
    """All rounds of a run, in at most BUCKETS buckets."""

    def __init__(self) -> None:
        self.width = 1
        self._buckets: dict[int, Bucket] = {}
        self._reset = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, node: str, segment: Segment, stamp: int) -> None:
        """Add a round of a site."""
        first = int(segment.round) // self.width * self.width
        bucket = self._buckets.setdefault(first, Bucket(first))
        bucket.take(segment, node)
        bucket.stamp = stamp
        while len(self._buckets) > BUCKETS:
            self._double(stamp)

    def _double(self, stamp: int) -> None:
        self.width *= 2
        old, self._buckets = self._buckets, {}
        for bucket in old.values():
            first = bucket.first // self.width * self.width
            self._buckets.setdefault(first, Bucket(first, stamp)).merge(bucket)
        self._reset = stamp

    def rows(self, since: int = 0) -> dict[str, Any]:
        """Buckets that changed after a stamp, for JSON; with `reset`, they replace all buckets sent before."""
        reset = self._reset > since or since == 0
        chosen = [self._buckets[first] for first in sorted(self._buckets)]
        return {
            "width": self.width,
            "reset": reset,
            "rows": [bucket.row() for bucket in chosen if reset or bucket.stamp > since],
        }
