"""Simulates a plan with the compiled event simulator (kernel.py has its rules) and returns the schedule.

The schedule lists the tasks of every site and the transfers between sites, with their times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.kernel import NEVER, Ints, Tables, desk
from pier_node.pipeline.planning.kernel import simulate as run
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem

NANO = 1e9


def ticks(seconds: Sequence[float] | Sequence[Sequence[float]]) -> Ints:
    """Seconds, of any shape, in whole nanoseconds."""
    return np.rint(np.asarray(seconds, dtype=np.float64) * NANO).astype(np.int64)


def tables(problem: Problem) -> Tables:
    """The times of a problem as arrays."""
    sites = problem.sites
    seconds = [[getattr(site, key) for site in sites] for key in ("forward_s", "backward_s", "loss_s")]
    memory = np.array([[site.memory for site in sites]], np.int64)
    uplink = ticks([problem.uplink_s or (0.0,) * len(sites)])
    gaps = ticks([problem.task_gap_s, problem.first_gap_s, problem.wave_s])
    return Tables(np.concatenate([ticks(seconds), memory, uplink]), ticks(problem.transfer_s), gaps)


def rows(plan: Plan) -> tuple[Ints, Ints]:
    """The paths of all microbatches [B, L], and the wave of each [B]."""
    numbers = [number for number, wave in enumerate(plan.waves) for _ in wave]
    return np.array(plan.paths, np.int64), np.array(numbers, np.int64)


FORWARD: Final = "forward"
LOSS: Final = "loss"
BACKWARD: Final = "backward"
Kind = Literal["forward", "loss", "backward"]
Way = Literal["forward", "backward"]


@dataclass(frozen=True)
class Task:
    """A site's work on a microbatch, which waits there from arrival to start.

    Times in seconds from the iteration's start.
    """

    site: int
    microbatch: int
    kind: Kind
    arrival_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Transfer:
    """An activation, or on the way back a gradient, sent between two sites."""

    source: int
    target: int
    microbatch: int
    kind: Way
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """An iteration. Microbatches are numbered wave by wave, like the plan's paths."""

    sites: int
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last backward is done."""
        return max(task.end_s for task in self.tasks)

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The fraction of the iteration in which each site computes."""
        busy = [0.0] * self.sites
        for task in self.tasks:
            busy[task.site] += task.end_s - task.start_s
        return tuple(seconds / self.makespan_s for seconds in busy)

    @cached_property
    def waiting_s(self) -> tuple[float, ...]:
        """Total seconds that microbatches waited at each site."""
        waited = [0.0] * self.sites
        for task in self.tasks:
            waited[task.site] += task.start_s - task.arrival_s
        return tuple(waited)


def simulate(problem: Problem, plan: Plan) -> Schedule:
    """Simulate an iteration of a valid plan. Raises PierError: microbatches deadlock on each other's memory."""
    paths, wave = rows(plan)
    length = paths.shape[1]
    room = desk(len(problem.sites), wave, recorded_steps=2 * length + 1)
    if run(tables(problem), room, paths, NEVER) == NEVER:
        raise PierError(
            "this plan never ends: microbatches wait for each other's memory",
            "Allow no swaps (rules.max_swaps = 0), which rules that out, or give the sites more memory.",
        )
    return _schedule(len(problem.sites), paths, room.record / NANO)


def makespan(problem: Problem, plan: Plan) -> float:
    """Seconds of an iteration. Raises PierError, as `simulate` does."""
    return simulate(problem, plan).makespan_s


def _schedule(sites: int, paths: Ints, record: NDArray[np.float64]) -> Schedule:
    tasks, transfers = [], []
    length = paths.shape[1]
    for number, (path, times) in enumerate(zip(paths.tolist(), record.tolist(), strict=True)):
        way = [*path, path[0], *reversed(path)]
        for step, (arrival, start, end, departure) in enumerate(times):
            kind: Kind = FORWARD if step < length else LOSS if step == length else BACKWARD
            tasks.append(Task(way[step], number, kind, arrival, start, end))
            if step < 2 * length:
                sent: Way = FORWARD if step < length else BACKWARD
                transfers.append(Transfer(way[step], way[step + 1], number, sent, departure, times[step + 1][0]))
    return Schedule(sites, tuple(sorted(tasks, key=lambda it: it.start_s)), tuple(transfers))
