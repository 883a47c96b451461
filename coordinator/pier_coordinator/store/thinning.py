"""Old samples are thinned: of a site's, one in five minutes stays when a day has gone by. The log keeps them all."""

from __future__ import annotations

from pier_coordinator.store.store import Store

DAY = 24 * 3600.0
SPAN = 300.0
STEP = 1000
"""Samples looked at, and at most deleted, in one go."""


class Thinning:
    """Goes on where it stopped the last time; after a start, from the first sample on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done = 0
        self._kept: dict[str, float] = {}

    async def run(self, now: float) -> int:
        """Thin out what has become old by `now`; returns how many samples are gone. Raises sqlite3.Error."""
        count = 0
        while samples := self._store.samples(self._done, now - DAY, STEP):
            extra = [number for number, time, node in samples if not self._keeps(time, node)]
            await self._store.forget(extra)
            self._done = samples[-1][0]
            count += len(extra)
        return count

    def _keeps(self, time: float, node: str) -> bool:
        span = time // SPAN
        fresh = self._kept.get(node) != span
        self._kept[node] = span
        return fresh
