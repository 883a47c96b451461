"""Deadlines learned from past waits: median + k·MAD, never only a constant.

MAD is the median absolute deviation; a quarter of the samples can be outliers without moving either value by much.
rounds/leader.py decides with it how long a round waits for members.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SPREAD = 6.0
"""k: about four standard deviations of a normal distribution."""
FEW = 8
"""Number of waits that must be known before they count."""
MEMORY = 64


class Deadline:
    """How long to wait for something, learned from how long it took before.

    Args:
        initial: deadline in seconds while fewer than FEW waits are known.
        floor: shortest deadline in seconds; below it the machine's jitter would decide, not the network.
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
        """The current deadline in seconds."""
        return self._seconds


class Backoff:
    """Pauses between failed attempts, in seconds: short at first, then doubling up to a limit."""

    def __init__(self, first: float = 0.05, last: float = 5.0) -> None:
        self._next, self._last = first, last

    def seconds(self) -> float:
        """The next pause in seconds."""
        pause, self._next = self._next, min(2 * self._next, self._last)
        return pause
