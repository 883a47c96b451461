"""How long a site takes for a microbatch: what the planner of paths wants to know of it."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

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
        given_up: all of it was in vain.
    """

    round: int
    began: float
    tasks: float = 0.0
    computing: float = 0.0
    average: float = 0.0
    total: float = 0.0
    step: float = 0.0
    given_up: bool = False


class Silence:
    """How long to wait for the next tensor: several times the longest of the last waits.

    Waits are of all lengths, from none to a whole iteration: their median says nothing about the long ones. A site that
    is gone is noticed by the roster much sooner; this is for one that lives and does nothing.
    """

    INITIAL, FLOOR, TIMES = 120.0, 30.0, 6.0

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=4 * MEMORY)

    def saw(self, seconds: float) -> None:
        """A wait ended well."""
        self._waits.append(seconds)

    def seconds(self) -> float:
        """The deadline now."""
        few = len(self._waits) < MEMORY
        return self.INITIAL if few else max(self.FLOOR, self.TIMES * max(self._waits))


class Pace:
    """Median seconds of a forward, a backward, a loss, and of transfers; 0 as long as there was none.

    The first task of a kind does not count: it takes many times longer, because libraries set themselves up. A site
    that had no other would be thought so slow that it gets none again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._warm: set[str] = set()

    def saw(self, hop: int, length: int, seconds: float) -> None:
        """A task took so long: see itinerary.py for its kind."""
        kind = KINDS[(hop >= length) + (hop > length)]
        if kind in self._warm:
            self._seen[kind].append(seconds)
        self._warm.add(kind)

    def sent(self, node: str, seconds: float) -> None:
        """A tensor was there after so long."""
        self._seen[node].append(seconds)

    def transfers(self) -> dict[str, float]:
        """Median seconds by node, of those to whom anything was sent."""
        return {node: self[node] for node in self._seen if node not in KINDS}

    def __getitem__(self, kind: str) -> float:
        seen = self._seen.get(kind)
        return median(seen) if seen else 0.0
