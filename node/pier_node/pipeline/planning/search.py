"""Finds a plan: assigns sites to stages and plans all paths together, by two annealings in a thread each.

Simulations take long with many sites. So an annealing begins with estimates: what the paths and the work of the sites
in one wave take if nothing waits. An estimate takes some hundredths of the time of a simulation.

A change (pipeline/planning/moves.py) that lengthens paths seldom helps, so most of these are not simulated. The
acceptance of the others is drawn before they are simulated, as a limit on their cost. A simulation that is certain to
exceed the limit stops early, and most do. Work is counted in steps. So a seed gives the same plan on every machine that
is not so slow that the deadline cuts the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.circuits import circuits
from pier_node.pipeline.planning.moves import (
    Dice,
    Ground,
    State,
    change_paths,
    change_sites,
    dice,
    estimate,
    laws,
    lengthening,
    retally,
    tally,
    uniform,
)
from pier_node.pipeline.planning.plan import Plan, random_plan, stage_loads, sync_seconds, worst_intra
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import (
    END,
    NEVER,
    Ints,
    Scratch,
    Tables,
    compiled,
    makespan,
    makespan_ns,
    rows,
    scratch,
    tables,
    ticks,
)

MEAN = 0.1
"""Weight of the mean end time of microbatches next to the makespan: many plans have the same makespan."""
SURE = 0.95
"""Fraction of that mean which is assumed while a change is simulated."""
OUTSIDE = 20
"""Cost of each second by which replicas are further apart than allowed."""


class Apart(NamedTuple):
    """Costs of distance: `transfer`, `gradient` [N, N] in ns, or [0, 0]; `sizes` [S + 1]; `limits` [2]: cap, fine."""

    transfer: Ints
    gradient: Ints
    sizes: Ints
    limits: Ints


class Course(NamedTuple):
    """A slice of an annealing: steps `start` to `stop` of `total`.

    `hot` and `cold` are the first and the last temperature, as fractions of the best cost so far. `joint` is the
    fraction of steps that move sites. `tied`: all waves repeat the same paths. `estimates`: nothing is simulated.
    """

    start: int
    stop: int
    total: int
    hot: float
    cold: float
    joint: float
    tied: bool
    estimates: bool


@compiled
def anneal(
    t: Tables, d: Scratch, g: Ground, apart: Apart, c: Course, now: State, trial: State, best: State, dice: Dice
) -> int:
    """Continue an annealing. Returns the number of plans that were simulated.

    Args:
        now, best: the current state, and the cheapest plan seen; `trial` is scratch.
    """
    extra = overhead(apart, now.stage)
    if c.estimates:
        tally(t, d.sites, now)
        now.cost[0] = estimate(d.sites, now) + extra
    else:
        now.cost[0] = cost(t, d, now, extra, int(NEVER))
    if now.cost[0] < best.cost[0]:
        copy(now, best)
    mean, simulated = mean_end(d.cases), 0
    for step in range(c.start, c.stop):
        heat = best.cost[0] * c.hot * (c.cold / c.hot) ** (step / c.total)
        changed = propose(t, g, c, heat, now, trial, dice)
        if changed == NOTHING:
            continue
        limit = now.cost[0] - heat * np.log(1.0 - uniform(dice))
        after = overhead(apart, trial.stage) if changed == SITES else extra
        if c.estimates:
            retally(t, d.sites, now, trial)
            trial.cost[0] = estimate(d.sites, trial) + after
        else:
            simulated += 1
            trial.cost[0] = cost(t, d, trial, after, int(limit - MEAN * SURE * mean))
        if trial.cost[0] > limit:
            if c.estimates:
                retally(t, d.sites, trial, now)
            continue
        extra, mean = after, mean_end(d.cases)
        copy(trial, now)
        if now.cost[0] < best.cost[0]:
            copy(now, best)
    return simulated


NOTHING, PATHS, SITES = range(3)
TRIES = 50
"""Changes that are tried for each simulation."""
LONGER = 50.0
"""Temperatures by which a change that is simulated lengthens all paths together: the mean of an exponential draw."""


@compiled
def propose(t: Tables, g: Ground, c: Course, heat: float, now: State, trial: State, dice: Dice) -> int:
    """Change the trial in a valid way, and say what changed. What lengthens paths much is not worth a simulation."""
    for _ in range(1 if c.estimates else TRIES):
        copy(now, trial)
        changed = SITES if uniform(dice) < c.joint else PATHS
        if not (change_sites(g, trial, dice) if changed == SITES else change_paths(g, trial, dice, c.tied)):
            continue
        if c.estimates or lengthening(t, now, trial) <= -LONGER * heat * np.log(1.0 - uniform(dice)):
            return changed
    return NOTHING


@compiled
def cost(t: Tables, d: Scratch, s: State, extra: int, limit: int) -> int:
    """The cost of a plan; NEVER if the simulation is abandoned. Sets who ends last."""
    end = makespan_ns(t, d, s.paths, limit - extra)
    if end == NEVER:
        return NEVER
    last = 0
    for it in range(d.cases.shape[1]):
        if d.cases[END, it] > d.cases[END, last]:
            last = it
    s.last[0] = s.paths[last, 0]
    return end + extra + int(MEAN * mean_end(d.cases))


@compiled
def overhead(apart: Apart, stage: Ints) -> int:
    """Time to sync the replicas of the slowest stage, plus a fine for replicas that are too far apart."""
    worst, sync = 0, 0
    for x in range(apart.transfer.shape[0]):
        for y in range(apart.transfer.shape[0]):
            size = apart.sizes[stage[x]]
            if x != y and stage[x] == stage[y] and size > 0:
                worst = max(worst, apart.transfer[x, y])
                sync = max(sync, 2 * (size - 1) * apart.gradient[x, y] // size)
    beyond = worst - apart.limits[0]
    return sync + (OUTSIDE * beyond + apart.limits[1] if beyond > 0 else 0)


@compiled
def copy(source: State, target: State) -> None:
    """Copy one state to another."""
    for row in range(source.paths.shape[0]):
        for index in range(source.paths.shape[1]):
            target.paths[row, index] = source.paths[row, index]
    for site in range(len(source.stage)):
        target.stage[site] = source.stage[site]
    target.cost[0], target.last[0] = source.cost[0], source.last[0]


@compiled
def mean_end(cases: Ints) -> float:
    """Mean end time of the microbatches."""
    total = 0
    for it in range(cases.shape[1]):
        total += cases[END, it]
    return float(total / cases.shape[1])


FINE = 0.1
"""Minimum fine for replicas that are too far apart, as a fraction of the first plan's makespan."""


@dataclass
class Chain:
    """The state of an annealing; `best` is the cheapest plan so far.

    `draft` makes the estimates: of paths without swaps, which never deadlock, and of one wave if all waves are equal.
    """

    problem: Problem
    times: Tables
    room: Scratch
    ground: Ground
    apart: Apart
    now: State
    trial: State
    best: State
    dice: Dice
    draft: Chain | None
    phase: Course | None = None
    simulated: int = 0

    @classmethod
    def anywhere(cls, problem: Problem, seed: int) -> Chain:
        """A chain that may begin with estimates, from a random plan. Raises PierError: no plan is valid."""
        plan, rules = random_plan(problem, seed), replace(problem.rules, max_swaps=0)
        if equal_waves(problem):
            one = replace(problem, rules=rules, microbatches=problem.wave_sizes[0], waves=1)
            return cls.of(problem, plan, seed, cls.of(one, Plan(plan.stages, plan.waves[:1]), seed))
        return cls.of(problem, plan, seed, cls.of(replace(problem, rules=rules), plan, seed))

    @classmethod
    def of(cls, problem: Problem, plan: Plan, seed: int, draft: Chain | None = None) -> Chain:
        """A chain that starts from a valid plan."""
        paths, wave = rows(plan)
        times, room = tables(problem), scratch(len(problem.sites), wave)
        first = np.searchsorted(wave, np.arange(problem.waves + 1)).astype(np.int64)
        load = np.zeros(len(problem.sites) + problem.stages, np.int64)
        near = np.argsort(times.wire + times.wire.T, axis=1, kind="stable")
        ground = Ground(laws(problem), times.times, first, load, _room(problem), near, times.wire)
        fine = int(FINE * makespan_ns(times, room, paths, NEVER))
        now, trial, best = (_state(problem, plan, paths) for _ in range(3))
        return cls(problem, times, room, ground, _apart(problem, fine), now, trial, best, dice(seed), draft)

    def run(self, course: Course) -> None:
        """Continue an annealing; a new one starts from the best plan so far, if any. Unequal waves are not tied."""
        course = course._replace(tied=course.tied and equal_waves(self.problem))
        phase, before = course._replace(start=0, stop=0), self.phase
        self.phase = phase
        if course.estimates and self.draft:
            self.draft.run(course)
            drafted = self.draft.best
            self.best.paths[:] = np.tile(drafted.paths, (len(self.best.paths) // len(drafted.paths), 1))
            self.best.stage[:], self.best.cost[:] = drafted.stage, drafted.cost
            return
        if phase != before:
            if self.best.cost[0] < NEVER:
                copy(self.best, self.now)
            self.best.cost[0] = NEVER  # what another phase reckoned does not compare
            if course.tied:
                self.now.paths[:] = np.tile(self.now.paths[: self.problem.wave_sizes[0]], (self.problem.waves, 1))
        self.simulated += anneal(
            self.times, self.room, self.ground, self.apart, course, self.now, self.trial, self.best, self.dice
        )

    @property
    def cost_s(self) -> float:
        """Cost of the best plan in seconds: about its makespan, its sync and a tenth of the mean end time.

        Infinite as long as there are only estimates.
        """
        return float(self.best.cost[0]) / 1e9 if self.simulated else math.inf

    @property
    def plan(self) -> Plan:
        """The best plan so far."""
        sites = self.best.stage.tolist()
        stages = tuple(
            tuple(index for index, stage in enumerate(sites) if stage == it) for it in range(self.problem.stages)
        )
        paths = [tuple(path) for path in self.best.paths.tolist()]
        ends = self.ground.first.tolist()
        return Plan(stages, tuple(tuple(paths[a:b]) for a, b in pairwise(ends)))


def equal_waves(problem: Problem) -> bool:
    """Whether all waves have equally many microbatches, so that they can repeat the same paths."""
    return len({*problem.wave_sizes}) == 1


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
    """Whether any site could take a visit over from another without giving one back."""
    loads = stage_loads(problem, problem.wave_sizes[0])
    memory = {site.memory for site in problem.sites}
    places = [max(memory) * size for size in problem.stage_sizes]
    return len(memory) > 1 or any(load != place for load, place in zip(loads, places, strict=True))


SLICES = 100
SPEED, FIXED_COST, ESTIMATE_COST = 0.4e9, 40, 2.75
"""Work of a thread per second: a task of a simulation costs FIXED_COST and half the number of sites; in an estimate it
costs ESTIMATE_COST.
"""
SPARE = 20
"""Slices by which a search may be late before it leaves any out."""
LEAST = 2000
Progress = Callable[[float, float], None]
"""Called with the fraction done and the cost of the best plan so far, in seconds."""


@dataclass(frozen=True)
class Phase:
    """A part of a search. Temperatures are fractions of the makespan; `joint`: fraction of steps that move sites."""

    share: float
    hot: float
    cold: float
    joint: float
    tied: bool = False
    estimates: bool = False


ESTIMATES = Phase(0.25, 0.02, 0.0003, 0.3, estimates=True)
TIED_FIRST = (ESTIMATES, Phase(0.37, 0.002, 0.0003, 0.05, tied=True), Phase(0.38, 0.001, 0.0002, 0.05))
FREE = (ESTIMATES, Phase(0.75, 0.008, 0.0004, 0.2))
PATHS_ONLY = (Phase(1.0, 0.006, 0.0005, 0.0),)
FROM_CIRCUITS = (Phase(1.0, 0.0005, 0.0001, 0.05),)
FEW_SITES, MANY_SITES, STAGES_STAY = (TIED_FIRST, FREE), (TIED_FIRST, TIED_FIRST), (PATHS_ONLY, PATHS_ONLY)
WITH_CIRCUITS = (FROM_CIRCUITS, FROM_CIRCUITS)
"""The phases of each thread. Repeating waves, or circuits, are a better beginning with many sites, from MANY on."""
MANY = 50
FORMING, CIRCUIT_COST = 0.3, 2.5
"""Part of the search's seconds in which circuits are formed besides, and the work of such a step for each site."""
FORMATIONS, TRIAL = 3, 0.05
"""How many times circuits are formed, because chance matters; and the part of the seconds for which each are improved,
to choose among them.
"""
PATIENCE = 3
"""How many times slower than an ordinary machine one may be before the search is cut short."""


@dataclass(frozen=True)
class Found:
    """A plan and the cost of finding it. `complete`: the deadline did not cut the search short."""

    plan: Plan
    makespan_s: float
    sync_s: float
    simulated: int
    seconds: float
    complete: bool

    @property
    def iteration_s(self) -> float:
        """Time until the replicas of all stages are synced again."""
        return self.makespan_s + self.sync_s


def search(
    problem: Problem,
    seed: int = 1,
    seconds: float = 10.0,
    current: Plan | None = None,
    told: Progress | None = None,
    deadline: float | None = None,
) -> Found:
    """The best plan that can be found with the work that an ordinary machine does in that many seconds.

    Args:
        seconds: sets the number of steps, and nothing else: a seed gives the same plan on a busy machine.
        current: a valid plan whose sites keep their stages: only its paths are improved; None: start from anywhere.
        told: called from time to time, in the caller's thread.
        deadline: seconds after which the search ends nevertheless; None: PATIENCE times `seconds`.

    Raises:
        PierError: no plan is valid, or no replicas are close enough to each other.
    """
    began = time.monotonic()
    many = len(problem.sites) >= MANY
    seeds = [seed * 2, seed * 2 + 1]
    starts = [current or (_circuits(problem, it, seconds) if many else None) for it in seeds]
    ways = STAGES_STAY if current else WITH_CIRCUITS if all(starts) else MANY_SITES if many else FEW_SITES
    chains = [
        Chain.of(problem, start, it) if start else Chain.anywhere(problem, it)
        for it, start in zip(seeds, starts, strict=True)
    ]
    courses = [[*_courses(problem, way, seconds)] for way in ways]
    complete = _run(chains, courses, deadline or PATIENCE * seconds, told)
    plan = min(chains, key=lambda it: (it.cost_s, it.best.cost[0])).plan
    cap, worst = problem.max_intra_s, worst_intra(problem.transfer_s, plan)
    if cap is not None and worst > cap:
        raise PierError(
            f"no stages found whose sites are at most {cap:g} s apart (max_intra_s); the nearest: {worst:.3g} s",
            "Allow more, or search longer.",
        )
    simulated, took = sum(it.simulated for it in chains), time.monotonic() - began
    return Found(plan, makespan(problem, plan), sync_seconds(problem, plan), simulated, took, complete)


def _circuits(problem: Problem, seed: int, seconds: float) -> Plan | None:
    """A plan to begin with; none if replicas shall be near each other, because circuits take no heed of that."""
    if problem.gradient_s or problem.max_intra_s is not None:
        return None
    steps = int(seconds * FORMING * SPEED / CIRCUIT_COST / len(problem.sites) / FORMATIONS)
    tried = []
    for turn in range(FORMATIONS):
        if plan := circuits(problem, seed * FORMATIONS + turn, max(LEAST, steps)):
            tried.append(Chain.of(problem, plan, seed))
            for course in _courses(problem, FROM_CIRCUITS, seconds * TRIAL):
                tried[-1].run(course)
    return min(tried, key=lambda it: it.best.cost[0]).plan if tried else None


def _courses(problem: Problem, way: Sequence[Phase], seconds: float) -> Iterator[Course]:
    tasks = problem.microbatches * (2 * problem.path_length + 1)
    simulation = tasks * (FIXED_COST + len(problem.sites) / 2)
    estimate = tasks * ESTIMATE_COST / (problem.waves if equal_waves(problem) else 1)
    for phase in way:
        work = estimate if phase.estimates else simulation
        total, slices = max(LEAST, int(seconds * phase.share * SPEED / work)), round(SLICES * phase.share)
        for index in range(slices):
            start, stop = total * index // slices, total * (index + 1) // slices
            yield Course(start, stop, total, phase.hot, phase.cold, phase.joint, phase.tied, phase.estimates)


def _run(chains: Sequence[Chain], courses: Sequence[Sequence[Course]], seconds: float, told: Progress | None) -> bool:
    """Run all chains in parallel, slice by slice. Returns whether they did all slices.

    If time runs short, slices are left out all along the way, so that each annealing cools down nevertheless.
    """
    for chain, ways in zip(chains, courses, strict=True):
        chain.run(ways[0]._replace(stop=0))  # compiled before time counts
    began, done, left_out = time.monotonic(), 0, 0
    with ThreadPoolExecutor(len(chains)) as pool:
        while done < SLICES:
            list(pool.map(Chain.run, chains, [ways[done] for ways in courses]))
            due = min(SLICES, int(SLICES * (time.monotonic() - began) / seconds))
            late = due - done - 1 if due > done + SPARE else 0
            left_out += late
            done += 1 + late
            if told:
                told(done / SLICES, min(it.cost_s for it in chains))
    return left_out == 0
