"""How long to wait: limits learned from past waits, median + k·MAD, never only a constant; and pauses between attempts.

MAD is the median absolute deviation; a quarter of the samples can be outliers without moving either value by much.
rounds/deadline.py decides with it how long a round waits for members.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from statistics import median

from pier_node.base.units import span

SPREAD = 6.0
"""k: about four standard deviations of a normal distribution."""
FEW = 8
"""Number of waits that must be known before they count."""
MEMORY = 64
MOST = 2.0
"""The longest deadline, as a multiple of the first: who is waited for must not be able to teach us more patience."""
TELL_SECONDS = 15.0
"""How often the log says what is still being tried."""

log = logging.getLogger(__name__)


class LearnedWait:
    """How long to wait for something, learned from how long it took before.

    Args:
        initial: deadline in seconds while fewer than FEW waits are known; later ones are at most MOST times as long.
        floor: shortest deadline in seconds; below it the machine's jitter would decide, not the network.
    """

    def __init__(self, initial: float, floor: float) -> None:
        self._floor = floor
        self._waits: deque[float] = deque(maxlen=MEMORY)
        self._seconds = max(initial, floor)
        self._most = MOST * self._seconds

    def saw(self, seconds: float) -> None:
        """Learn from a wait that ended well."""
        self._waits.append(seconds)
        if len(self._waits) >= FEW:
            middle = median(self._waits)
            spread = median(abs(wait - middle) for wait in self._waits)
            self._seconds = min(max(self._floor, middle + SPREAD * spread), self._most)

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


class Attempts:
    """Attempts to reach something that may not be there yet. The log says what is tried, and for how long.

    Args:
        what: the problem, in the words of the log: "no peer answers yet".
        patience: seconds for all attempts together.
    """

    def __init__(self, what: str, patience: float) -> None:
        self._what, self._clock = what, asyncio.get_running_loop().time
        self._end, self._told, self._backoff = self._clock() + patience, -math.inf, Backoff(last=2.0)

    async def failed(self, why: str) -> bool:
        """Pause after a failed attempt. Returns whether there is time for another one."""
        now = self._clock()
        if now > self._end:
            return False
        if now - self._told >= TELL_SECONDS:
            self._told = now
            log.warning("%s: %s; trying for %s more", self._what, why, span(self._end - now))
        await asyncio.sleep(self._backoff.seconds())
        return True
