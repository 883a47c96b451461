"""Deadlines learnt from what was seen: median + k·MAD of past waits, never a bare constant.

MAD is the median absolute deviation; a quarter of the samples may be wild without moving either by much.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SPREAD = 6.0
"""k: about four standard deviations of a normal distribution."""
FEW = 8
"""Waits that must be known before they are believed."""
MEMORY = 64


class Deadline:
    """How long to wait for something that has taken so and so long before.

    Args:
        initial: seconds while fewer than FEW waits are known.
        floor: seconds below which jitter of the machine, not the network, would decide.
    """

    def __init__(self, initial: float, floor: float) -> None:
        self._floor = floor
        self._waits: deque[float] = deque(maxlen=MEMORY)
        self._seconds = max(initial, floor)

    def saw(self, seconds: float) -> None:
        """Learn from a wait that ended well."""
        self._waits.append(seconds)
        if len(self._waits) >= FEW:
            middle = median(self._waits)
            spread = median(abs(wait - middle) for wait in self._waits)
            self._seconds = max(self._floor, middle + SPREAD * spread)

    def seconds(self) -> float:
        """The deadline now."""
        return self._seconds


class Backoff:
    """Pauses between failed attempts: short at first, doubling, bounded."""

    def __init__(self, first: float = 0.05, last: float = 5.0) -> None:
        self._next, self._last = first, last

    def seconds(self) -> float:
        """The next pause."""
        pause, self._next = self._next, min(2 * self._next, self._last)
        return pause
