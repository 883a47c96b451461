"""A curve with a limited number of points: neighbours are merged and keep their minimum, mean and maximum.

Points are buckets of equal width, aligned to multiples of the width. When there are too many, the width doubles and
pairs of points are merged. Curves of different sites therefore have their points at the same places.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from typing import Any, Self

FARTHEST = 2.0**53
"""Places beyond this are ignored: a double cannot tell them apart."""

COLUMNS = ("places", "sums", "least", "most", "counts")


class Series:
    """Values by place (a time in seconds, or a round), in at most `limit` points, which is at least 3."""

    def __init__(self, limit: int) -> None:
        self.width = 1.0
        self._limit = limit
        self._places, self._sums, self._least, self._most = (array("d") for _ in range(4))
        self._counts, self._stamps = array("Q"), array("Q")
        self._reset = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: float, value: float | None, stamp: int) -> None:
        """Take in a value. Unknown and non-finite values are ignored. `stamp` is that of this change, for `points`."""
        if value is None or not math.isfinite(value) or not abs(place) < FARTHEST:
            return
        # Round down to an integer first: dividing a place next to zero could move it across a border between points.
        start = math.floor(place) // self.width * self.width
        at = bisect_left(self._places, start)
        if at == len(self._places) or self._places[at] != start:
            self._insert(at, start, value)
        self._sums[at] += value
        self._least[at] = min(self._least[at], value)
        self._most[at] = max(self._most[at], value)
        self._counts[at] += 1
        self._stamps[at] = stamp
        while len(self._places) > self._limit:
            self._double(stamp)

    def _insert(self, at: int, start: float, value: float) -> None:
        self._places.insert(at, start)
        self._sums.insert(at, 0.0)
        self._least.insert(at, value)
        self._most.insert(at, value)
        self._counts.insert(at, 0)
        self._stamps.insert(at, 0)

    def _double(self, stamp: int) -> None:
        self.width *= 2
        old = list(zip(self._places, self._sums, self._least, self._most, self._counts))
        for column in (self._places, self._sums, self._least, self._most, self._counts, self._stamps):
            del column[:]
        for place, total, least, most, count in old:
            start = place // self.width * self.width
            if not self._places or self._places[-1] != start:
                self._insert(len(self._places), start, least)
            self._sums[-1] += total
            self._least[-1] = min(self._least[-1], least)
            self._most[-1] = max(self._most[-1], most)
            self._counts[-1] += count
        self._stamps = array("Q", [stamp]) * len(self._places)
        self._reset = stamp

    def kept(self) -> dict[str, Any]:
        """Copies of its columns, for a snapshot of the board."""
        return {"width": self.width, **{key: getattr(self, f"_{key}")[:] for key in COLUMNS}}

    @classmethod
    def restored(cls, limit: int, kept: dict[str, Any], stamp: int) -> Self:
        """The curve of which `kept` gave the columns; `stamp` is that of this change."""
        curve = cls(limit)
        curve.width = kept["width"]
        for key in COLUMNS:
            setattr(curve, f"_{key}", kept[key])
        curve._stamps = array("Q", [stamp]) * len(curve)
        return curve

    def means(self) -> list[float]:
        """The mean value of each point, in order."""
        return [total / count for total, count in zip(self._sums, self._counts)]

    def last(self) -> float | None:
        """The mean value of the last point; None if there is none."""
        return self._sums[-1] / self._counts[-1] if self._places else None

    def points(self, since: int = 0) -> dict[str, Any]:
        """Points that changed after a stamp, for JSON; with `reset`, they replace all points sent before."""
        reset = self._reset > since or since == 0
        chosen = [at for at, stamp in enumerate(self._stamps) if reset or stamp > since]
        return {
            "width": self.width,
            "reset": reset,
            "x": [self._places[at] for at in chosen],
            "mean": [rounded(self._sums[at] / self._counts[at]) for at in chosen],
            "min": [rounded(self._least[at]) for at in chosen],
            "max": [rounded(self._most[at]) for at in chosen],
        }


def rounded(value: float | None) -> float | None:
    """Round to six significant digits, which is what a screen can show; None if it is not a finite number."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
