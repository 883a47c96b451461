"""How often one may ask: a token bucket for each caller and method, so that no site can drown the others out."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pier_coordinator.store.refusals import TooFast

BUCKETS = 8192
"""Most buckets remembered. The one forgotten was asked for the longest ago, so that it would be full again."""


@dataclass(frozen=True)
class Rate:
    """So many calls a second in the long run, and so many at once."""

    per_second: float
    burst: int


RATES: Mapping[str, Rate] = {
    "Enrol": Rate(2, 30),
    "Register": Rate(0.5, 10),
    "Heartbeat": Rate(4, 20),
    "Watch": Rate(0.5, 10),
    "Deliver": Rate(20, 200),  # a sheet for each expert, domain and split
    "GiveCheckpoint": Rate(0.5, 20),
    "FetchCheckpoint": Rate(0.5, 20),
    "Report": Rate(10, 60),  # what a site has kept while the coordinator was down comes in a burst
}


@dataclass
class _Bucket:
    level: float
    filled: float


class Limits:
    """Counts calls.

    Args:
        clock: seconds that never go backward.
    """

    def __init__(self, rates: Mapping[str, Rate] = RATES, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def count(self, caller: str, method: str) -> None:
        """Count a call. Raises TooFast."""
        rate, now = self._rates[method], self._clock()
        bucket = self._buckets.pop((caller, method), None) or _Bucket(rate.burst, now)
        self._buckets[caller, method] = bucket
        if len(self._buckets) > BUCKETS:
            self._buckets.popitem(last=False)
        bucket.level = min(rate.burst, bucket.level + (now - bucket.filled) * rate.per_second)
        bucket.filled = now
        if bucket.level < 1:
            seconds = (1 - bucket.level) / rate.per_second
            raise TooFast(
                f"{method}: more than {rate.per_second:g} calls a second; ask again in {seconds:.1f} s", seconds
            )
        bucket.level -= 1
