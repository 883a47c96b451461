"""One annealing from one plan: the arrays that it works on, and how it goes on, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pier_coordinator.paths.anneal import Apart, Course, anneal
from pier_coordinator.paths.dice import Dice, dice
from pier_coordinator.paths.kernel import NEVER, Desk, Ints, Tables, desk, simulate
from pier_coordinator.paths.laws import laws
from pier_coordinator.paths.moves import Ground, State
from pier_coordinator.paths.plan import Plan
from pier_coordinator.paths.problem import Problem
from pier_coordinator.paths.start import stage_loads
from pier_coordinator.paths.tables import rows, tables, ticks

FINE = 0.1
"""What it costs at least, of the first plan's makespan, that replicas are too far apart."""


@dataclass
class Chain:
    """The state of an annealing; `best` is the cheapest plan so far."""

    problem: Problem
    times: Tables
    desk: Desk
    ground: Ground
    apart: Apart
    now: State
    trial: State
    best: State
    dice: Dice
    simulated: int = 0

    @classmethod
    def of(cls, problem: Problem, plan: Plan, seed: int) -> Chain:
        """That begins at a plan that is allowed."""
        paths, wave = rows(plan)
        times, room = tables(problem), desk(len(problem.sites), wave)
        first = np.searchsorted(wave, np.arange(problem.waves + 1)).astype(np.int64)
        load = np.zeros(len(problem.sites) + problem.stages, np.int64)
        near = np.argsort(times.wire + times.wire.T, axis=1, kind="stable")
        ground = Ground(laws(problem), times.times, first, load, _room(problem), near)
        fine = int(FINE * simulate(times, room, paths, NEVER))
        now, trial, best = (_state(problem, plan, paths) for _ in range(3))
        return cls(problem, times, room, ground, _apart(problem, fine), now, trial, best, dice(seed))

    def run(self, course: Course) -> None:
        """Goes on with an annealing; a new one begins at the best plan, if there is one. Unequal waves are not tied."""
        if course.start == 0 and self.simulated:
            for mine, best in zip(self.now, self.best, strict=True):
                mine[:] = best
        course = course._replace(tied=course.tied and len({*self.problem.wave_sizes}) == 1)
        if course.tied and course.start == 0:
            self.now.paths[:] = np.tile(self.now.paths[: self.problem.wave_sizes[0]], (self.problem.waves, 1))
        self.simulated += anneal(
            self.times, self.desk, self.ground, self.apart, course, self.now, self.trial, self.best, self.dice
        )

    @property
    def cost_s(self) -> float:
        """Of the best plan: about its makespan and sync, and a tenth of its microbatches' mean time."""
        return float(self.best.cost[0]) / 1e9

    @property
    def plan(self) -> Plan:
        """The best so far."""
        sites = self.best.stage.tolist()
        stages = tuple(
            tuple(index for index, stage in enumerate(sites) if stage == it) for it in range(self.problem.stages)
        )
        paths = [tuple(path) for path in self.best.paths.tolist()]
        ends = self.ground.first.tolist()
        return Plan(stages, tuple(tuple(paths[a:b]) for a, b in pairwise(ends)))


def _state(problem: Problem, plan: Plan, paths: Ints) -> State:
    stage = np.full(len(problem.sites), problem.stages, np.int64)
    for site, it in plan.stage_of().items():
        stage[site] = it
    return State(paths.copy(), stage, np.array([NEVER], np.int64), np.zeros(1, np.int64))


def _apart(problem: Problem, fine: int) -> Apart:
    count = len(problem.sites)
    counts = problem.max_intra_s is not None or bool(problem.gradient_s)
    transfer = ticks(problem.transfer_s) if counts else np.zeros((0, 0), np.int64)
    gradient = ticks(problem.gradient_s) if problem.gradient_s else np.zeros((count, count), np.int64)
    cap = int(ticks([problem.max_intra_s])[0]) if problem.max_intra_s is not None else NEVER
    sizes = np.array([*problem.stage_sizes, 0], np.int64)
    return Apart(transfer, gradient, sizes, np.array([cap, fine], np.int64))


def _room(problem: Problem) -> bool:
    """Whether any site could take over from another without giving something back."""
    loads = stage_loads(problem, problem.wave_sizes[0])
    memory = {site.memory for site in problem.sites}
    places = [max(memory) * size for size in problem.stage_sizes]
    return len(memory) > 1 or any(load != place for load, place in zip(loads, places, strict=True))
