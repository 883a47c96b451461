"""What the sites tell at one time, together, from samples that come one by one: the latest of each, for a minute."""

from __future__ import annotations

WINDOW = 60.0
"""Seconds after which a sample says nothing any more."""

GRAIN = 1_000_000
"""Values are added as whole millionths: a sum that is kept for weeks must not drift."""


class Latest:
    """The latest value of each site."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, int]] = {}
        self._sum = 0

    def take(self, node: str, time: float, value: float) -> None:
        """A site has told its value."""
        self.forget(node)
        grains = round(value * GRAIN)
        self._latest[node] = (time, grains)
        self._sum += grains
        self._expire(time)

    @property
    def sum(self) -> float:
        """Over all sites that told theirs lately."""
        return self._sum / GRAIN

    @property
    def mean(self) -> float:
        """Likewise. Raises ZeroDivisionError when there is none."""
        return self.sum / len(self._latest)

    def forget(self, node: str) -> bool:
        """A site has no value any more; returns whether it had one."""
        _, grains = self._latest.pop(node, (0.0, None))
        self._sum -= grains or 0
        return grains is not None

    def _expire(self, now: float) -> None:
        while True:
            node, (time, _) = next(iter(self._latest.items()))
            if now - time <= WINDOW:
                return
            self.forget(node)
