"""How long a plan takes: runs the compiled event simulator (kernel.py has its rules) and reads off the schedule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pier_coordinator.paths.kernel import NEVER, Ints, desk
from pier_coordinator.paths.kernel import simulate as run
from pier_coordinator.paths.plan import Plan
from pier_coordinator.paths.problem import Problem
from pier_coordinator.paths.schedule import BACKWARD, FORWARD, LOSS, Kind, Schedule, Task, Transfer, Way
from pier_coordinator.paths.tables import NANO, rows, tables
from pier_node.errors import PierError


def simulate(problem: Problem, plan: Plan) -> Schedule:
    """An iteration of a plan that is allowed. Raises PierError: microbatches wait for each other's memory for ever."""
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
