"""How fast a site can send, learnt from what it sent in an exchange.

The mean over an exchange will not do: all members end together, held back by the slowest, and would look alike. The
busiest second is the site's own: while it still sends to others than the slowest, its uplink is what limits it.
"""

from __future__ import annotations

WINDOW = 1.0
"""Seconds; long enough that what the kernel buffers does not count as sent."""


class Meter:
    """Bytes sent, by windows of time. Time is whatever clock the caller reads."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._windows: dict[int, int] = {}
        self._total = 0

    def sent(self, count: int, now: float) -> None:
        """So many bytes left at that time."""
        window = int((now - self._began) / WINDOW)
        self._windows[window] = self._windows.get(window, 0) + count
        self._total += count
        self._last = now

    def rate(self) -> float:
        """Bytes a second: of the busiest whole window; of everything when all was over before one was full; 0: none."""
        elapsed = self._last - self._began
        whole = [count for window, count in self._windows.items() if (window + 1) * WINDOW <= elapsed]
        if whole:
            return max(whole) / WINDOW
        return self._total / elapsed if elapsed > 0 else 0.0
