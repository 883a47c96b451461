"""Rate limits: a token bucket for each caller and method, so that no site can crowd out the others."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pier_coordinator.store.refusals import TooFast

BUCKETS = 8192
"""Maximum number of buckets kept. The least recently used one is dropped: it would be full again by then."""


@dataclass(frozen=True)
class Rate:
    """A rate limit.

    Attributes:
        per_second: calls per second in the long run.
        burst: calls at once.
    """

    per_second: float
    burst: int


RATES: Mapping[str, Rate] = {
    "Enrol": Rate(2, 30),
    "Register": Rate(0.5, 10),
    "Heartbeat": Rate(4, 20),
    "Watch": Rate(0.5, 10),
    "Deliver": Rate(20, 200),  # one sheet per expert, domain and split
    "GiveCheckpoint": Rate(0.5, 20),
    "FetchCheckpoint": Rate(0.5, 20),
    "Report": Rate(10, 60),  # records that a site kept while the coordinator was down come in a burst
}


@dataclass
class _Bucket:
    level: float
    filled: float


class Limits:
    """Counts calls and refuses those above the rates.

    Args:
        clock: a monotonic clock, in seconds.
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
