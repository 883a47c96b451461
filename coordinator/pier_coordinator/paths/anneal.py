"""Simulated annealing over the event simulator, compiled (spec/skippipe.md section 4, best known).

Whether a change will be taken is drawn before it is simulated, as a limit on its cost: a simulation that is sure to
exceed it ends there, and most do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pier_coordinator.paths.compiled import compiled
from pier_coordinator.paths.dice import Dice, uniform
from pier_coordinator.paths.kernel import END, NEVER, Desk, Ints, Tables, simulate
from pier_coordinator.paths.moves import Ground, State, change_paths, change_sites

MEAN = 0.1
"""Weight of the mean time at which microbatches end, beside the makespan: many plans have the same makespan."""
SURE = 0.95
"""Part of that mean which is taken for granted while a change is simulated."""
OUTSIDE = 20
"""What a second costs by which replicas are further apart than they may be."""


class Apart(NamedTuple):
    """What distance costs: `transfer`, `gradient` [N, N] in ns, or [0, 0]; `sizes` [S + 1], `limits` [2]: cap, fine."""

    transfer: Ints
    gradient: Ints
    sizes: Ints
    limits: Ints


class Course(NamedTuple):
    """Of an annealing: steps from `start` to `stop` of `total`; hot to cold, in parts of the best cost so far.

    `joint` is the part of the steps that move sites; `tied`: waves repeat each other.
    """

    start: int
    stop: int
    total: int
    hot: float
    cold: float
    joint: float
    tied: bool


@compiled
def anneal(
    t: Tables, d: Desk, g: Ground, apart: Apart, c: Course, now: State, trial: State, best: State, dice: Dice
) -> int:
    """Goes on with an annealing; returns how many plans were simulated.

    Args:
        now, best: where it stands, and the cheapest plan it saw; `trial` is scratch.
    """
    extra = overhead(apart, now.stage)
    now.cost[0] = cost(t, d, now, extra, int(NEVER))
    if now.cost[0] < best.cost[0]:
        copy(now, best)
    mean, simulated = mean_end(d.cases), 0
    for step in range(c.start, c.stop):
        copy(now, trial)
        moves_sites = uniform(dice) < c.joint
        if not (change_sites(g, trial, dice) if moves_sites else change_paths(g, trial, dice, c.tied)):
            continue
        heat = best.cost[0] * c.hot * (c.cold / c.hot) ** (step / c.total)
        limit = now.cost[0] - heat * np.log(1.0 - uniform(dice))
        after = overhead(apart, trial.stage) if moves_sites else extra
        simulated += 1
        trial.cost[0] = cost(t, d, trial, after, int(limit - MEAN * SURE * mean))
        if trial.cost[0] > limit:
            continue
        extra, mean = after, mean_end(d.cases)
        trial.last[0] = last_origin(d.cases, trial.paths)
        copy(trial, now)
        if now.cost[0] < best.cost[0]:
            copy(now, best)
    return simulated


@compiled
def cost(t: Tables, d: Desk, s: State, extra: int, limit: int) -> int:
    """What a plan is worth; NEVER where the simulation is given up."""
    makespan = simulate(t, d, s.paths, limit - extra)
    if makespan == NEVER:
        return NEVER
    return makespan + extra + int(MEAN * mean_end(d.cases))


@compiled
def overhead(apart: Apart, stage: Ints) -> int:
    """Time to sync the replicas of the slowest stage, and a fine for those that are too far apart."""
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
    """Makes two states equal."""
    for row in range(source.paths.shape[0]):
        for index in range(source.paths.shape[1]):
            target.paths[row, index] = source.paths[row, index]
    for site in range(len(source.stage)):
        target.stage[site] = source.stage[site]
    target.cost[0], target.last[0] = source.cost[0], source.last[0]


@compiled
def mean_end(cases: Ints) -> float:
    """When microbatches end, in the mean."""
    total = 0
    for it in range(cases.shape[1]):
        total += cases[END, it]
    return float(total / cases.shape[1])


@compiled
def last_origin(cases: Ints, paths: Ints) -> int:
    """The site whose microbatch ends last."""
    last = 0
    for it in range(cases.shape[1]):
        if cases[END, it] > cases[END, last]:
            last = it
    return int(paths[last, 0])
