"""How the time of rounds was spent: in parts for each site's last rounds, and in sums for all rounds of the run.

Sums are kept for buckets of rounds. When there are too many buckets, their width doubles. Of some rounds, the slowest
site is found, and it is said in words why it was slow.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from pier_coordinator.runs.series import rounded
from pier_coordinator.store.facts import amount, whole
from pier_node.base.units import rate, several

PARTS = ("compute", "waiting", "exchange", "retry")
LATEST = 200
"""Number of rounds of a site of which all parts are kept."""
BUCKETS = 400
"""Maximum number of buckets for all rounds of a run."""
MARGIN = 1.1
"""A site is slow if it is busy at least this many times as long per round as the others."""
NOTABLE = 0.2
"""If the exchange takes at least this fraction of the time, the text names the thinnest uplink."""


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

    def kept(self) -> array[float]:
        """A copy of its numbers, for a snapshot of the board."""
        return self._numbers[:]

    @classmethod
    def restored(cls, numbers: array[float]) -> Self:
        """The rounds of which `kept` gave the numbers."""
        segments = cls()
        segments._numbers = numbers
        return segments

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

    @classmethod
    def of(cls, segment: Segment, node: str) -> Self:
        """A bucket with one site's round."""
        parts = {part: getattr(segment, part) for part in PARTS}
        return cls(int(segment.round), records=1, **parts, longest=segment.duration, busiest=segment.busy, slowest=node)

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
        bucket.merge(Bucket.of(segment, node))
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

    def kept(self) -> dict[str, Any]:
        """Its buckets, for a snapshot of the board."""
        return {"width": self.width, "buckets": [asdict(bucket) for bucket in self._buckets.values()]}

    @classmethod
    def restored(cls, kept: dict[str, Any], stamp: int) -> Self:
        """The timings of which `kept` gave the buckets; `stamp` is that of this change."""
        timings = cls()
        timings.width = kept["width"]
        for fields in kept["buckets"]:
            timings._buckets[fields["first"]] = Bucket(**{**fields, "stamp": stamp})
        return timings

    def rows(self, since: int = 0) -> dict[str, Any]:
        """Buckets that changed after a stamp, for JSON; with `reset`, they replace all buckets sent before."""
        reset = self._reset > since or since == 0
        chosen = [self._buckets[first] for first in sorted(self._buckets)]
        return {
            "width": self.width,
            "reset": reset,
            "rows": [bucket.row() for bucket in chosen if reset or bucket.stamp > since],
        }


@dataclass(frozen=True)
class Slow:
    """A site that others waited for.

    Attributes:
        wins: number of rounds in which it was busy longest.
        rounds: number of rounds compared.
        busy: its mean busy time per round, in seconds.
        others: that of the other sites, in seconds.
        cause: the part of a round in which it exceeds the others most.
    """

    node: str
    wins: int
    rounds: int
    busy: float
    others: float
    cause: str


def shares(segments: Sequence[Segment]) -> dict[str, float]:
    """The fraction of the time that each part took; empty if no time has passed."""
    total = sum(segment.duration for segment in segments)
    return {part: sum(getattr(segment, part) for segment in segments) / total for part in PARTS} if total else {}


def slowest(by_node: Mapping[str, Sequence[Segment]]) -> Slow | None:
    """The site that was busy longest in at least half of the rounds; None if all take about the same time."""
    rounds: dict[float, dict[str, float]] = defaultdict(dict)
    for node, segments in by_node.items():
        for segment in segments:
            rounds[segment.round][node] = segment.busy
    shared = [busy for busy in rounds.values() if len(busy) > 1]
    if not shared:
        return None
    node, wins = Counter(max(busy, key=busy.__getitem__) for busy in shared).most_common(1)[0]
    own, others = _means(by_node[node]), _means([it for key, rows in by_node.items() if key != node for it in rows])
    busy, rest = (sum(means.values()) - means["waiting"] for means in (own, others))
    if wins * 2 < len(shared) or busy < MARGIN * rest or busy == 0:
        return None
    cause = max(("compute", "exchange", "retry"), key=lambda part: own[part] - others[part])
    return Slow(node, wins, len(shared), busy, rest, cause)


def _means(segments: Sequence[Segment]) -> dict[str, float]:
    return {part: sum(getattr(segment, part) for segment in segments) / len(segments) for part in PARTS}


def slowness_in_words(
    by_node: Mapping[str, Sequence[Segment]], names: Mapping[str, str], uplinks: Mapping[str, float | None]
) -> str:
    """A few sentences on these rounds; uplinks are in bytes per second."""
    everything = [segment for segments in by_node.values() for segment in segments]
    spent = shares(everything)
    if not spent:
        return "No rounds yet."
    parts = ", ".join(f"{100 * spent[part]:.0f} % {part}" for part in PARTS if spent[part] >= 0.005)
    return f"{_who(slowest(by_node), names)} Time went to: {parts}.{_line(spent, names, uplinks)}"


def _line(spent: Mapping[str, float], names: Mapping[str, str], uplinks: Mapping[str, float | None]) -> str:
    known = {node: uplink for node, uplink in uplinks.items() if uplink}
    if spent["exchange"] < NOTABLE or len(known) < 2:
        return ""
    node = min(known, key=known.__getitem__)
    return f" The thinnest uplink is that of {names.get(node, node)}: {rate(known[node])}."


def _who(slow: Slow | None, names: Mapping[str, str]) -> str:
    if slow is None:
        return "No site held the others up."
    name = names.get(slow.node, slow.node)
    return (
        f"{name} was slowest in {slow.wins} of {several(slow.rounds, 'round')}: {slow.busy:.3g} s busy a round, "
        f"the others {slow.others:.3g} s; most of the difference is {slow.cause}."
    )
