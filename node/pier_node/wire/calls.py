"""How many calls a node answers at once, so that no peer takes all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

CALLS = 4096
CALLS_PER_PEER = 64


class Busy(Exception):
    """A peer has as many calls under way as one may have."""


class Calls:
    """The calls under way, by peer."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """For one call of a peer. Raises Busy."""
        if self._under_way[caller] >= CALLS_PER_PEER:
            raise Busy(f"{CALLS_PER_PEER} calls of {caller} are under way already")
        self._under_way[caller] += 1
        try:
            yield
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
