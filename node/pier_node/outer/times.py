"""Measured times: how a site spends its rounds and iterations, and how long its tasks and transfers take.

Times belong to outer rounds. Spans, Silence and Pace belong to pipelines; Pace is what the planner of paths knows of a
site's speed.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from pier_node.base.tracing import span


@dataclass
class Times:
    """How a site spent one outer round, in seconds.

    Attributes:
        waiting: seconds spent waiting for the others.
        exchange: seconds spent in the attempt that was decided.
        retry: seconds spent in attempts that were given up.
    """

    waiting: float = 0.0
    exchange: float = 0.0
    retry: float = 0.0

    @contextmanager
    def spent_waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting."""
        began = time.monotonic()
        try:
            with span("waiting"):
                yield
        finally:
            self.waiting += time.monotonic() - began

    @contextmanager
    def spent_on_attempt(self) -> Iterator[None]:
        """Count the time of the block as an attempt, which fails by raising an exception.

        A cancelled attempt has not failed: another member reported the commit before the last vote arrived.
        """
        began, failed = time.monotonic(), False
        try:
            with span("attempt"):
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
        """The same proportions of another total: for a round hidden behind inner steps, only the rest is visible."""
        own = self.waiting + self.exchange + self.retry
        share = total / own if own > 0 else 0.0
        return Times(self.waiting * share, self.exchange * share, self.retry * share)


KINDS = ("forward", "loss", "backward")
MEMORY = 32
"""Number of waits that must be known before they count."""
RECENT = 9
"""Number of tasks of a kind, or of transfers, that are remembered: a slower site or link shows after five."""


@dataclass
class Spans:
    """How a site spent one attempt at an iteration, in seconds; `began` is in seconds since the epoch.

    Attributes:
        tasks: seconds until its last task was done and everything was sent: the part that the planner simulates.
        computing: seconds of `tasks` that were spent computing.
        average: seconds for averaging the gradient with the replicas of the stage.
        total: seconds until the norm over all stages was known.
        step: seconds for AdamW and writing to disk.
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

    Waits range from nothing to a whole iteration, so their median says nothing about the long ones. The roster notices
    a site that is gone much sooner; this deadline is for a site that is alive and does nothing.

    Args:
        initial: deadline in seconds while fewer than `few` waits are known.
        floor: shortest deadline in seconds.
    """

    TIMES, LONGEST = 6.0, 14_400.0

    def __init__(self, initial: float = 120.0, floor: float = 30.0, few: int = MEMORY) -> None:
        self._initial, self._floor, self._few = initial, floor, few
        self._waits: deque[float] = deque(maxlen=4 * few)

    def saw(self, seconds: float) -> None:
        """Learn from a wait that ended well."""
        self._waits.append(seconds)

    def late(self) -> None:
        """Note a deadline that was too short: double it, up to LONGEST, until enough new waits are known."""
        self._initial = max(self.seconds(), min(2 * self.seconds(), self.LONGEST))
        self._waits.clear()

    def seconds(self) -> float:
        """The current deadline in seconds."""
        few = len(self._waits) < self._few
        return self._initial if few else max(self._floor, self.TIMES * max(self._waits))


class Recent:
    """The last durations of one thing, forgotten once it has not been done for a number of iterations.

    That number doubles each time, and falls back to FIRST once the thing was done in FIRST iterations again.
    """

    FIRST, LAST = 32, 1024

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._patience, self._done, self._missed, self._now = self.FIRST, 0, 0, False

    def saw(self, seconds: float) -> None:
        """Note that it was done and took this many seconds."""
        self._seconds.append(seconds)
        self._now = True

    def over(self) -> None:
        """Note the end of an iteration."""
        done, self._now = self._now, False
        self._done, self._missed = self._done + done, 0 if done else self._missed + 1
        if self._done >= self.FIRST:
            self._patience = self.FIRST
        if self._seconds and self._missed >= self._patience:
            self._seconds.clear()
            self._patience, self._done = min(2 * self._patience, self.LAST), 0

    @property
    def median(self) -> float:
        """Median in seconds; 0 if it is not known."""
        return median(self._seconds) if self._seconds else 0.0


class Pace:
    """Median seconds of a forward, a backward, a loss, and of transfers; 0 where nothing was measured.

    The first task of a kind does not count: it takes many times longer, because libraries initialize. A site with no
    other measurement would look so slow that it got no more tasks. Old measurements are forgotten: the planner gives no
    work to a site that was slow, so the site could not otherwise show that it no longer is.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Recent] = defaultdict(Recent)
        self._warm: set[str] = set()

    def saw(self, hop: int, length: int, seconds: float) -> None:
        """Note how long a task took; pipeline/iteration_plan.py defines its kind."""
        kind = KINDS[(hop >= length) + (hop > length)]
        if kind in self._warm:
            self._seen[kind].saw(seconds)
        self._warm.add(kind)

    def sent(self, node: str, seconds: float) -> None:
        """Note how long a tensor took to arrive."""
        self._seen[node].saw(seconds)

    def over(self) -> None:
        """Note the end of an iteration."""
        for recent in self._seen.values():
            recent.over()

    def transfers(self) -> dict[str, float]:
        """Median seconds by node, for the nodes that anything was sent to."""
        known = {node: recent.median for node, recent in self._seen.items() if node not in KINDS}
        return {node: seconds for node, seconds in known.items() if seconds}

    def __getitem__(self, kind: str) -> float:
        return self._seen[kind].median if kind in self._seen else 0.0
