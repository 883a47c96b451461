"""What can happen to the sites of a run: a schedule, drawn from a seed, that reads as text and can be cut down."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from typing import Any, Self

from simulation.network import Weather

from pier_node.base.faults import PAIR_PHASES, PHASES
from pier_node.config.run import RunConfig

NAMES = ["a1", "b2", "c3", "d4", "e5"]
"""Of sites; their node ids begin with them, see keys.py."""
BATCH = 20


def storms(count: int) -> int:
    """How many storms a test goes through: this many, times PIER_STORMS, with other seeds, and in whole batches."""
    return max(1, round(count * float(os.environ.get("PIER_STORMS", "1")) / BATCH)) * BATCH


@dataclass(frozen=True)
class Fault:
    """One of them, at a virtual time.

    Attributes:
        kind: see `World.inflict`.
        span: seconds that it lasts: until the site is started again, the network is whole, the disk is free.
        how: a phase, what becomes of a write, how a disk is full or a checkpoint damaged.
        number: a round, in which or after which it comes to the phase; or how many writes later.
        since: its time counts from the first commit of this round; 0: from the start.
    """

    at: float
    kind: str
    site: str
    span: float = 0.0
    how: str = ""
    number: int = 0
    others: tuple[str, ...] = ()
    since: int = 0

    def __str__(self) -> str:
        since = f" after round {self.since}" if self.since else ""
        told = [f"{self.at:6.1f} s{since}  {self.kind} {self.site}", *self.others, self.how, str(self.number or "")]
        return f"{' '.join(it for it in told if it)} for {self.span:.1f} s"


@dataclass(frozen=True)
class Schedule:
    """A run, its weather and its faults."""

    seed: int
    names: tuple[str, ...]
    config: RunConfig
    weather: Weather
    faults: tuple[Fault, ...]
    latency: float = 0.0
    founder: str = "a1"
    calm: float = 0.0
    """Seconds within which the first round is waited for before time counts for faults."""
    paces: dict[str, float] = field(default_factory=dict)
    large: bool = False
    """Workers train on while a result is written, as with a large model."""
    grid: bool = False
    """More than two sites exchange their updates in two levels, as a large run does."""

    def without(self, number: int) -> Self:
        """Less one fault."""
        return replace(self, faults=self.faults[:number] + self.faults[number + 1 :])

    def __str__(self) -> str:
        outer = self.config.outer
        ways = {key: getattr(outer, key) for key in ("algorithm", "start", "overlap", "fragments", "codec")}
        told = ", ".join(f"{key} {value}" for key, value in ways.items())
        told += ", large" * self.large + ", grid" * self.grid
        head = f"seed {self.seed}: {len(self.names)} sites, founder {self.founder}, {told}, {self.weather}"
        return "\n".join([head, *map(str, self.faults)])


def drawn(seed: int, pairs: bool = False) -> Schedule:
    """Everything that a seed says."""
    dice = random.Random(f"{'pairs' if pairs else 'rounds'} {seed}")
    names = tuple(NAMES[: dice.choice([2, 2, 3, 3, 3, 4, 5])])
    config = _pairs(dice, len(names)) if pairs else _rounds(dice, len(names))
    return Schedule(
        seed=seed,
        names=names,
        config=config,
        weather=Weather.drawn(dice),
        faults=_faults(dice, names, PAIR_PHASES if pairs else PHASES),
        latency=dice.choice([0.0, 0.0, 0.05, 0.5]),
        founder=dice.choice(names),
        calm=dice.choice([0.0, 300.0, 300.0, 300.0, 300.0]),
        paces={name: 0.2 + dice.random() for name in names},
        large=dice.random() < 0.5,
        grid=dice.random() < 0.5,
    )


def settings(sites: int, steps: int, **outer: Any) -> RunConfig:
    """A run of so many inner steps."""
    return RunConfig.model_validate(
        {
            "run": {"sites": sites},
            "inner": {"total_steps": steps, "eval_every": 0},
            "outer": {"inner_steps": 4, **outer},
        }
    )


def _rounds(dice: random.Random, sites: int) -> RunConfig:
    algorithm = dice.choice(["diloco"] * 6 + ["pier", "pier", "sync"])
    codec = {"codec": dice.choice(["none", "int8", "int4"])}
    if algorithm == "sync":
        return settings(sites, 10, algorithm="sync", **codec)
    ways = {
        "overlap": dice.random() < 0.5,
        "fragments": dice.choice([1, 1, 2, 4]),
        "adaptive_steps": dice.random() < 0.5,
        **codec,
    }
    if algorithm == "pier":
        start = dice.choice(["solo", "sync", "none"])
        ways |= {"start": start, "start_fraction": 0.0 if start == "none" else 0.2}
    return settings(sites, dice.choice([16, 24, 32]), algorithm=algorithm, **ways)


def _pairs(dice: random.Random, sites: int) -> RunConfig:
    ways = {
        "overlap": dice.random() < 0.5,
        "adaptive_steps": dice.random() < 0.5,
        "codec": dice.choice(["none", "int8", "int4"]),
        "noloco": {"gamma": dice.choice([0.7, 0.3])},
        "final_merge": dice.random() < 0.5,
    }
    return settings(sites, dice.choice([16, 24]), algorithm="noloco", **ways)


KINDS = {
    "crash": 8,
    "crash at phase": 4,
    "crash at write": 4,
    "stop": 6,
    "older": 1,
    "full": 2,
    "partition": 5,
    "sever": 3,
    "pause": 2,
    "clock": 1,
}
"""How often each kind is drawn."""


def _faults(dice: random.Random, names: tuple[str, ...], phases: tuple[str, ...]) -> tuple[Fault, ...]:
    at, found = dice.uniform(0.5, 20.0), []
    kinds = [kind for kind in KINDS if dice.random() < 0.5] or [*KINDS]  # few kinds at a time come deeper
    for _ in range(dice.randint(2, 8)):
        kind = dice.choices(kinds, [KINDS[it] for it in kinds])[0]
        found.append(_fault(dice, kind, at, names, phases))
        at += dice.expovariate(1 / dice.choice([1.0, 5.0, 15.0]))
    return tuple(found)


def _fault(dice: random.Random, kind: str, at: float, names: tuple[str, ...], phases: tuple[str, ...]) -> Fault:
    site, span, how, number = dice.choice(names), _span(dice), "", 0
    others: tuple[str, ...] = ()
    if kind == "crash at phase":
        how, number = dice.choice(phases), dice.randint(1, 6)
    elif kind == "crash at write":
        how, number = dice.choice(["lost", "torn", "done"]), dice.randint(1, 12)
    elif kind == "older":
        how = dice.choice(["deleted", "torn"])
    elif kind == "full":
        how = dice.choice(["full", "failing"])
    elif kind == "partition":
        others = tuple(name for name in names if name != site and dice.random() < 0.3)
    elif kind == "sever":
        others = (dice.choice([name for name in names if name != site]),)
    since = dice.choice([0, 0, dice.randint(1, 5)])
    return Fault(dice.uniform(0.0, 5.0) if since else at, kind, site, span, how, number, others, since)


def _span(dice: random.Random) -> float:
    return dice.choice([dice.uniform(0.0, 2.0), dice.uniform(0.0, 60.0), dice.uniform(0.0, 60.0)])
