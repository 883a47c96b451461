"""Says how far a state has come that is being fetched: on a slow line that takes minutes, or hours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pier_node.units import age, amount, rate

EVERY = 15.0
"""Seconds between two lines of the log."""

log = logging.getLogger(__name__)


class Arrival:
    """Told after every piece: bytes that are here, bytes in all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._told = clock()
        self._before: int | None = None  # of what is here, pieces that came before a peer was lost

    def __call__(self, arrived: int, total: int) -> None:
        """Say so now and then."""
        now = self._clock()
        if self._before is None:
            self._began, self._before = now, arrived
        if now - self._told < EVERY or arrived == total or now == self._began:
            return
        self._told, speed = now, (arrived - self._before) / (now - self._began)
        left = f", {age((total - arrived) / speed)} left" if speed else ""
        log.info("%s of %s of the run's state are here, at %s%s", amount(arrived), amount(total), rate(speed), left)
