"""The sum of what the sites do at one time, from samples that come one by one."""

from __future__ import annotations

WINDOW = 60.0
"""Seconds after which a sample says nothing any more."""

GRAIN = 1000
"""Rates are added as whole thousandths: a sum that is kept for weeks must not drift."""


class Rates:
    """The latest rate of each site, and their sum."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, int]] = {}
        self._sum = 0

    def take(self, node: str, time: float, rate: float) -> float:
        """A site has told its rate; returns the sum over all sites that told theirs lately."""
        self._forget(node)
        grains = round(rate * GRAIN)
        self._latest[node] = (time, grains)
        self._sum += grains
        self._expire(time)
        return self._sum / GRAIN

    def _forget(self, node: str) -> None:
        self._sum -= self._latest.pop(node, (0.0, 0))[1]

    def _expire(self, now: float) -> None:
        while True:
            node, (time, _) = next(iter(self._latest.items()))
            if now - time <= WINDOW:
                return
            self._forget(node)
