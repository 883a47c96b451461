"""Where the time of an outer round went.

How long a site takes for a microbatch: what the planner of paths wants to know of it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median


@dataclass
class Times:
    """Of one round, in seconds.

    Attributes:
        waiting: for the others.
        exchange: in the attempt that was decided.
        retry: in attempts that were given up.
    """

    waiting: float = 0.0
    exchange: float = 0.0
    retry: float = 0.0

    @contextmanager
    def spent_waiting(self) -> Iterator[None]:
        """Count what is done meanwhile as waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waiting += time.monotonic() - began

    @contextmanager
    def spent_on_attempt(self) -> Iterator[None]:
        """Count what is done meanwhile as an attempt, which fails by raising.

        One that is cancelled has not failed: another member's word that it is committed came before the last vote.
        """
        began, failed = time.monotonic(), False
        try:
            yield
        except Exception:
            failed = True
            raise
        finally:
            spent = time.monotonic() - began
            if failed:
                self.retry += spent
            else:
                self.exchange += spent

    def scaled_to(self, total: float) -> Times:
        """The same shares of another total: of what was hidden behind inner steps, only the rest is seen."""
        own = self.waiting + self.exchange + self.retry
        share = total / own if own > 0 else 0.0
        return Times(self.waiting * share, self.exchange * share, self.retry * share)


KINDS = ("forward", "loss", "backward")
MEMORY = 32
"""Waits that are needed before they say anything."""
RECENT = 9
"""Tasks of a kind, or transfers, that are remembered: a site or a line that gets slower is known after five."""


@dataclass
class Spans:
    """Where the time of an attempt went at this site, in seconds; `began`: since the epoch.

    Attributes:
        tasks: until its last task was done and all was sent: the schedule that the planner has simulated.
        computing: of these, in tasks.
        average: of the gradient, with the replicas of the stage.
        total: until the norm over all stages was known.
        step: AdamW, and the disk.
    """

    round: int
    began: float
    tasks: float = 0.0
    computing: float = 0.0
    average: float = 0.0
    total: float = 0.0
    step: float = 0.0


class Silence:
    """How long to wait for the next tensor, or for all others: several times the longest of the last waits.

    Waits are of all lengths, from none to a whole iteration: their median says nothing about the long ones. A site that
    is gone is noticed by the roster much sooner; this is for one that lives and does nothing.

    Args:
        initial: seconds as long as fewer than `few` waits are known.
        floor: seconds that it never falls below.
    """

    TIMES, LONGEST = 6.0, 14_400.0

    def __init__(self, initial: float = 120.0, floor: float = 30.0, few: int = MEMORY) -> None:
        self._initial, self._floor, self._few = initial, floor, few
        self._waits: deque[float] = deque(maxlen=4 * few)

    def saw(self, seconds: float) -> None:
        """A wait ended well."""
        self._waits.append(seconds)

    def late(self) -> None:
        """It was too short: twice as long from now on, LONGEST at most, until it is known again how long waits are."""
        self._initial = max(self.seconds(), min(2 * self.seconds(), self.LONGEST))
        self._waits.clear()

    def seconds(self) -> float:
        """The deadline now."""
        few = len(self._waits) < self._few
        return self._initial if few else max(self._floor, self.TIMES * max(self._waits))


class Recent:
    """The last durations of one thing, until it was not done for so many iterations that they are forgotten.

    Each time it takes twice as many until the next time; once it was done in FIRST of them again, as many as at first.
    """

    FIRST, LAST = 32, 1024

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._patience, self._done, self._missed, self._now = self.FIRST, 0, 0, False

    def saw(self, seconds: float) -> None:
        """It was done, and took so long."""
        self._seconds.append(seconds)
        self._now = True

    def over(self) -> None:
        """An iteration is."""
        done, self._now = self._now, False
        self._done, self._missed = self._done + done, 0 if done else self._missed + 1
        if self._done >= self.FIRST:
            self._patience = self.FIRST
        if self._seconds and self._missed >= self._patience:
            self._seconds.clear()
            self._patience, self._done = min(2 * self._patience, self.LAST), 0

    @property
    def median(self) -> float:
        """0: not known."""
        return median(self._seconds) if self._seconds else 0.0


class Pace:
    """Median seconds of a forward, a backward, a loss, and of transfers; 0 as long as there was none.

    The first task of a kind does not count: it takes many times longer, because libraries set themselves up. A site
    that had no other would be thought so slow that it gets none again. And what was measured long ago is forgotten: the
    planner has nothing to do for a site that was slow, which could not show otherwise that it no longer is.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Recent] = defaultdict(Recent)
        self._warm: set[str] = set()

    def saw(self, hop: int, length: int, seconds: float) -> None:
        """A task took so long: see pipeline/iteration_plan.py for its kind."""
        kind = KINDS[(hop >= length) + (hop > length)]
        if kind in self._warm:
            self._seen[kind].saw(seconds)
        self._warm.add(kind)

    def sent(self, node: str, seconds: float) -> None:
        """A tensor was there after so long."""
        self._seen[node].saw(seconds)

    def over(self) -> None:
        """An iteration is over."""
        for recent in self._seen.values():
            recent.over()

    def transfers(self) -> dict[str, float]:
        """Median seconds by node, of those to whom anything was sent."""
        known = {node: recent.median for node, recent in self._seen.items() if node not in KINDS}
        return {node: seconds for node, seconds in known.items() if seconds}

    def __getitem__(self, kind: str) -> float:
        return self._seen[kind].median if kind in self._seen else 0.0
