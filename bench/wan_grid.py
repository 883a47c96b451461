"""The grid of bench/wan.py: its methods and rates, what a cell should reach, and the public figures to compare with.

u = c / (c + x) without overlap, c / max(c, x) with it: c seconds of compute a round, x seconds of exchange, both ways
at once. Two sites that average P values send P each: 2·P·(n − 1)/n by reduce-scatter and all-gather, P by a swap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pier_node.config.run import RunConfig
from pier_node.rounds.prediction import exchange_bytes, inner_steps, share_of_compute

PARAMETERS = 30_846_720
"""Of the model behind the public figures."""
STEP_SECONDS = 0.0261
"""An inner step there: 4.703 s of compute in 180 steps (its raw record of H = 128 at 50 Mbit/s, compute_s). Solved from
the measured utilisations by u = c / (c + N/B), N bytes of fp32, it would be 19.8 to 21.7 ms: those have more in x."""
LATENCY = 0.04
RATES = (20, 50, 200, 1000)
STEPS = (32, 128)
PUBLIC = {
    32: {50: 0.0241, 200: 0.1001, 1000: 0.3601, 5000: 0.6810},
    128: {50: 0.1155, 200: 0.3609, 1000: 0.7152, 5000: 0.8700},
}
"""Utilisation by H and Mbit/s: github.com/Adnan082/diloco-measured, four L40S on a shaped LAN, no codec, no overlap;
there a site sends 1.5 P a round, here P."""

METHODS: dict[str, dict[str, Any]] = {
    "ddp": {"algorithm": "sync"},
    "diloco none": {"algorithm": "diloco"},
    "pier int8": {"algorithm": "pier", "start": "none", "codec": "int8"},
    "pier int4 + overlap": {"algorithm": "pier", "start": "none", "codec": "int4", "overlap": True},
    "diloco int4 + overlap + fragments": {"algorithm": "diloco", "codec": "int4", "overlap": True, "fragments": 4},
    "noloco int8 + overlap": {"algorithm": "noloco", "codec": "int8", "overlap": True},
}
"""The [outer] section of each."""

LONG = 30.0
"""Seconds of an exchange from which on a cell is reckoned from another one's rate, and the longest is measured once."""


@dataclass(frozen=True)
class Task:
    """A cell: a method on a link.

    Attributes:
        rate: of the link, Mbit/s each way.
        latency: one way, seconds.
        steps: H.
        patience: seconds of rounds to measure, as long as that syncs the whole model 1 to 6 times.
    """

    method: str
    rate: int
    latency: float
    steps: int
    parameters: int = PARAMETERS
    step_seconds: float = STEP_SECONDS
    patience: float = 8.0

    def config(self) -> RunConfig:
        """A run that never ends by itself."""
        outer = {"inner_steps": self.steps, "adaptive_steps": False, **METHODS[self.method]}
        inner = {"total_steps": 10_000 * self.steps, "eval_every": 0}
        return RunConfig.model_validate({"run": {"name": "wan", "sites": 2}, "inner": inner, "outer": outer})

    @property
    def fragments(self) -> int:
        """Rounds in which the whole model is synced once."""
        return self.config().outer.fragments

    @property
    def bits(self) -> float:
        """Payload that a site sends in a round, by the codec's reckoning; a swap of two has as much as an average."""
        return 8 * exchange_bytes(self.config(), self.parameters, 2) / self.fragments

    @property
    def compute(self) -> float:
        """c, seconds of inner steps a round."""
        return inner_steps(self.config()) * self.step_seconds / self.fragments

    def ideal(self, rate: float) -> float:
        """Utilisation if the payload travelled at `rate` Mbit/s and nothing else took time."""
        return share_of_compute(self.config(), self.compute, self.bits / rate * 1e-6)

    def round_seconds(self, rate: float) -> float:
        """Of a round, likewise."""
        return self.compute / self.ideal(rate)

    def rounds(self) -> tuple[int, int]:
        """Rounds to leave out first, and rounds to measure; fewer where they take long.

        The first two exchanges of the whole model touch new memory. With overlap they are seen a round later.
        """
        whole = self.round_seconds(self.rate) * self.fragments
        warm = 2 * self.fragments + ("overlap" in self.method) if whole < 6 else self.fragments
        return warm, self.fragments * min(max(math.ceil(self.patience / whole), 1), 6)


@dataclass(frozen=True)
class Cell:
    """What a cell came to.

    Attributes:
        utilisation: compute time over wall time, at the slower site.
        mbit: payload that a site sent over wall time, Mbit/s.
        exchange: of the last round, seconds from announcing it to having it committed; NaN: reckoned.
        rounds: measured; 0: reckoned by formula from the rate that another method reached on this link.
    """

    task: Task
    utilisation: float
    mbit: float
    exchange: float
    rounds: int

    def record(self) -> dict[str, Any]:
        """For JSON."""
        own = {**vars(self), "ideal": self.task.ideal(self.task.rate)}
        exchange = None if math.isnan(self.exchange) else self.exchange
        return {**vars(self.task), **{name: own[name] for name in own if name != "task"}, "exchange": exchange}


def reckoned(task: Task, like: Cell) -> Cell:
    """A cell from the time that a larger or equal exchange without overlap took on the same link."""
    x = (like.task.compute / like.utilisation - like.task.compute) * task.bits / like.task.bits
    share = share_of_compute(task.config(), task.compute, x)
    seconds = task.compute / share
    return Cell(task, share, 1e-6 * task.bits / seconds, math.nan, 0)


def tasks(rates: tuple[int, ...], latency: float) -> list[Task]:
    """All cells, the one that others are reckoned from first. ddp has no H: it is there once a rate."""
    found = []
    for rate in rates:
        for method in sorted(METHODS, key=lambda it: it != "diloco none"):
            steps = (1,) if method == "ddp" else sorted(STEPS, reverse=True)
            found += [Task(method, rate, latency, each) for each in steps]
    return found


def is_long(task: Task) -> bool:
    """Whether its exchange takes long even on an ideal link."""
    return 1e-6 * task.bits / task.rate > LONG
