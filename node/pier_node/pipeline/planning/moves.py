"""The moves of the search, and estimates of what they cost, compiled.

A move changes a plan slightly and returns whether the result is valid.

Most moves keep the load of every site: two microbatches exchange a site or the tails of their paths, or two sites swap
places everywhere, possibly across stages. If sites have spare memory, one may take over a visit from another. The
validity checks here are compiled; pipeline/planning/plan.py implements the same rules independently. The random numbers
are splitmix64: the same on every machine and with every library version.

An estimate of the time of an iteration comes from what every site has to do, as if nothing ever waited. A tally has two
sums for each site: how long a slot of its memory is held, and how long it works. A change of a plan changes few paths,
so the tally is brought up to date instead of made anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import (
    BACKWARD,
    FORWARD,
    GAP,
    LOSS,
    MEMORY,
    Ints,
    Tables,
    compiled,
    inlined,
    unloaded,
)

Dice = NDArray[np.uint64]


def dice(seed: int) -> Dice:
    """A random stream for each seed."""
    return np.array([seed % 2**64], np.uint64)


@compiled
def uniform(dice: Dice) -> float:
    """A random number from 0 up to, but not including, 1."""
    dice[0] += np.uint64(0x9E3779B97F4A7C15)
    z = dice[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def below(dice: Dice, count: int) -> int:
    """A random integer from 0 to count - 1."""
    return int(uniform(dice) * count)


MAX_SWAPS, MAX_DISTANCE, MAX_TOTAL, MAX_JUMP = range(4)


class Laws(NamedTuple):
    """`least` and `most` [W, S]: visits of each stage in a wave; `rules` [4]: limits on the stages' order in a path."""

    least: Ints
    most: Ints
    rules: Ints


def laws(problem: Problem) -> Laws:
    """The laws of a problem."""
    rules, later = problem.rules, problem.stages - 1
    visits = [size * (problem.path_length - 1) for size in problem.wave_sizes]
    least = [[size, *[count // later] * later] for size, count in zip(problem.wave_sizes, visits, strict=True)]
    most = [[size, *[-(-count // later)] * later] for size, count in zip(problem.wave_sizes, visits, strict=True)]
    limits = [rules.max_swaps, rules.max_distance, rules.max_total, rules.max_jump]
    return Laws(np.array(least, np.int64), np.array(most, np.int64), np.array(limits, np.int64))


@compiled
def lawful_path(rules: Ints, stages: int, stage: Ints, paths: Ints, row: int) -> bool:
    """Whether the stages of a path are in a valid order, each once, stage 0 first."""
    furthest, swaps, total = 0, 0, 0
    for index in range(paths.shape[1]):
        it = stage[paths[row, index]]
        if it == stages or (it == 0) != (index == 0):
            return False
        for earlier in range(index):
            if stage[paths[row, earlier]] == it:
                return False
        if it - furthest > rules[MAX_JUMP] or furthest - it > rules[MAX_DISTANCE]:
            return False
        if it < furthest:
            swaps += 1
            total += furthest - it
        furthest = max(furthest, it)
    return bool(swaps <= rules[MAX_SWAPS] and total <= rules[MAX_TOTAL])


REROUTE, TAILS, REORDER, REPLACE, NEAR, AIM = 0.1, 0.12, 0.12, 0.2, 0.4, 0.5
"""Probabilities of the moves of paths.

In this order: go another way over spare memory; exchange tails; reorder, if swaps are allowed; replace a site, if
there is spare memory; exchange a site for a near one; and choose a path of the site that is last.
"""
SPREAD = 0.5
"""By how much a hop may count as longer when a path looks for another way."""
TOGETHER = 0.7
"""Probability that two sites that swap stages also swap places in all paths."""


class State(NamedTuple):
    """A plan being changed: `paths` [B, L], `stage` [N] (S: idle), `cost` [1] in ns, `last` [1].

    `last` is the site that ends last, or that has most to do by an estimate.
    """

    paths: Ints
    stage: Ints
    cost: Ints
    last: Ints


class Ground(NamedTuple):
    """The fixed data of the search.

    `first` [W + 1]: start of each wave; `load` [N + S]: scratch; `room`: whether sites have spare memory; `near` [N,
    N]: the sites ordered by distance from each site. `wire` [from N, to N]: of a transfer, in ns.
    """

    laws: Laws
    times: Ints
    first: Ints
    load: Ints
    room: bool
    near: Ints
    wire: Ints


@compiled
def lawful_loads(g: Ground, s: State, waves: range) -> bool:
    """Whether memory suffices and stages have equal load in these waves."""
    sites, load = len(s.stage), g.load
    for wave in waves:
        load[:] = 0
        for row in range(g.first[wave], g.first[wave + 1]):
            for index in range(s.paths.shape[1]):
                load[s.paths[row, index]] += 1
                load[sites + s.stage[s.paths[row, index]]] += 1
        for site in range(sites):
            if load[site] > g.times[MEMORY, site]:
                return False
        for it in range(g.laws.least.shape[1]):
            if load[sites + it] < g.laws.least[wave, it] or load[sites + it] > g.laws.most[wave, it]:
                return False
    return True


@compiled
def change_paths(g: Ground, s: State, dice: Dice, tied: bool) -> bool:
    """Change one path, or two of a wave; if tied, in all waves alike."""
    wave = 0 if tied else below(dice, len(g.first) - 1)
    start, count = g.first[wave], g.first[wave + 1] - g.first[wave]
    a, b = start + below(dice, count), start + below(dice, count)
    if uniform(dice) < AIM:
        for _ in range(3 * len(s.stage)):
            if _visits(s.paths, a, s.last[0]):
                break
            a = start + below(dice, count)
    swaps = g.laws.rules[MAX_SWAPS] > 0
    moved, chance = False, uniform(dice)
    if g.room and chance < REROUTE:
        b = a
        if not _reroute(g, s, dice, wave, a):
            return False
    elif g.room and chance < REPLACE:
        b, moved = a, True
        _replace(g.near, s.paths, dice, a)
    elif swaps and chance < REPLACE + REORDER:
        b = a
        _exchange_within(s.paths, dice, a)
    elif chance > 1 - TAILS:
        if a == b:
            return False
        _exchange_tails(s.paths, dice, a, b)
    elif chance > 1 - TAILS - NEAR:
        b = _exchange_near(g.near, s.paths, dice, start, count, a)
        if a == b:
            return False
    elif a == b:
        return False
    else:
        _exchange(s.paths, dice, a, b)
    for row in (a, b):
        if not swaps:
            _sort(s.stage, s.paths, row)
        if not lawful_path(g.laws.rules, g.laws.least.shape[1], s.stage, s.paths, row):
            return False
    if tied:
        _repeat(s.paths, g.first, a)
        _repeat(s.paths, g.first, b)
    waves = range(len(g.first) - 1) if tied else range(wave, wave + 1)
    return not moved or lawful_loads(g, s, waves)


@compiled
def change_sites(g: Ground, s: State, dice: Dice) -> bool:
    """Two sites swap stages, places, or both."""
    x, y = below(dice, len(s.stage)), below(dice, len(s.stage))
    if x == y or s.stage[x] == s.stage[y] == g.laws.least.shape[1]:
        return False
    if s.stage[x] == s.stage[y] or uniform(dice) < TOGETHER:
        _rename(s.paths, x, y)
    s.stage[x], s.stage[y] = s.stage[y], s.stage[x]
    for row in range(s.paths.shape[0]):
        if g.laws.rules[MAX_SWAPS] == 0:
            _sort(s.stage, s.paths, row)
        if not lawful_path(g.laws.rules, g.laws.least.shape[1], s.stage, s.paths, row):
            return False
    return bool(lawful_loads(g, s, range(len(g.first) - 1)))


@compiled
def _replace(near: Ints, paths: Ints, dice: Dice, a: int) -> None:
    """A path gets another site: one near another of its sites, or any."""
    i, j = below(dice, paths.shape[1]), below(dice, paths.shape[1])
    close = near[paths[a, j], int(near.shape[1] * uniform(dice) ** 2)]
    paths[a, i] = close if i != j else below(dice, near.shape[1])


@compiled
def _reroute(g: Ground, s: State, dice: Dice, wave: int, row: int) -> bool:
    """A path begins at any origin, and goes a short way over sites of its stages, all of which have a place left.

    Returns whether there is such a way. Each hop counts as longer than it is, by up to a half, so that ways differ.
    """
    sites, length, load, memory = len(s.stage), s.paths.shape[1], g.load, g.times[MEMORY]
    load[:] = 0
    for other in range(g.first[wave], g.first[wave + 1]):
        if other != row:
            for index in range(length):
                load[s.paths[other, index]] += 1
    origin, tried = below(dice, sites), 0
    while (s.stage[origin] != 0 or load[origin] >= memory[origin]) and tried < sites:
        origin, tried = (origin + 1) % sites, tried + 1
    cost, before = np.full((length, sites), np.inf), np.zeros((length, sites), np.int64)
    cost[0, origin] = 0.0
    for index in range(1, length):
        stage = s.stage[s.paths[row, index]]
        for to in range(sites):
            if s.stage[to] != stage or load[to] >= memory[to]:
                continue
            busy = g.times[FORWARD, to] + g.times[BACKWARD, to]
            for at in range(sites):
                if cost[index - 1, at] < np.inf:
                    hop = busy + g.wire[at, to] + g.wire[to, at]
                    total = cost[index - 1, at] + hop * (1.0 + SPREAD * uniform(dice))
                    if total < cost[index, to]:
                        cost[index, to], before[index, to] = total, at
    site = int(np.argmin(cost[length - 1] + g.wire[:, origin] + g.wire[origin]))
    if cost[length - 1, site] == np.inf:
        return False
    for index in range(length - 1, -1, -1):
        s.paths[row, index] = site
        site = before[index, site]
    return True


@compiled
def _visits(paths: Ints, row: int, site: int) -> bool:
    found = False
    for index in range(paths.shape[1]):
        found |= paths[row, index] == site
    return found


@compiled
def _exchange(paths: Ints, dice: Dice, a: int, b: int) -> None:
    """Two paths exchange a site. An origin is exchanged only for an origin."""
    i = below(dice, paths.shape[1])
    j = i if i == 0 else 1 + below(dice, paths.shape[1] - 1)
    paths[a, i], paths[b, j] = paths[b, j], paths[a, i]


@compiled
def _exchange_near(near: Ints, paths: Ints, dice: Dice, start: int, count: int, a: int) -> int:
    """A path gets a site near another of its sites, from another path. Returns that path, or itself."""
    length = paths.shape[1]
    i, j = 1 + below(dice, length - 1), below(dice, length)
    if i == j:
        return a
    wanted = near[paths[a, j], int(near.shape[1] * uniform(dice) ** 2)]
    shift = below(dice, count)
    for index in range(count):
        b = start + (index + shift) % count
        if b == a:
            continue
        for place in range(1, length):
            if paths[b, place] == wanted:
                paths[a, i], paths[b, place] = wanted, paths[a, i]
                return b
    return a


@compiled
def _exchange_tails(paths: Ints, dice: Dice, a: int, b: int) -> None:
    for index in range(1 + below(dice, paths.shape[1] - 1), paths.shape[1]):
        paths[a, index], paths[b, index] = paths[b, index], paths[a, index]


@compiled
def _exchange_within(paths: Ints, dice: Dice, a: int) -> None:
    i, j = 1 + below(dice, paths.shape[1] - 1), 1 + below(dice, paths.shape[1] - 1)
    paths[a, i], paths[a, j] = paths[a, j], paths[a, i]


@compiled
def _rename(paths: Ints, x: int, y: int) -> None:
    for row in range(paths.shape[0]):
        for index in range(paths.shape[1]):
            if paths[row, index] == x:
                paths[row, index] = y
            elif paths[row, index] == y:
                paths[row, index] = x


@compiled
def _sort(stage: Ints, paths: Ints, row: int) -> None:
    for index in range(2, paths.shape[1]):
        site, place = paths[row, index], index
        while place > 1 and stage[paths[row, place - 1]] > stage[site]:
            paths[row, place] = paths[row, place - 1]
            place -= 1
        paths[row, place] = site


@compiled
def _repeat(paths: Ints, first: Ints, row: int) -> None:
    """Copy a path of the first wave to the same microbatch of every other wave."""
    for wave in range(1, len(first) - 1):
        if first[wave] + row < first[wave + 1]:
            for index in range(paths.shape[1]):
                paths[first[wave] + row, index] = paths[row, index]


HELD, WORK = range(2)
"""Rows of a tally, whose columns are the sites."""


@compiled
def tally(t: Tables, sites: Ints, s: State) -> None:
    """Set how long each site works and its memory is held if nothing waits."""
    sites[HELD] = 0
    sites[WORK] = 0
    for row in range(s.paths.shape[0]):
        _count(t.times, t.wire, t.gaps, sites, s.paths, row, 1)


@compiled
def retally(t: Tables, sites: Ints, before: State, after: State) -> None:
    """Bring a tally up to date: only the paths that differ are counted."""
    for row in range(after.paths.shape[0]):
        if _differs(before.paths, after.paths, row):
            _count(t.times, t.wire, t.gaps, sites, before.paths, row, -1)
            _count(t.times, t.wire, t.gaps, sites, after.paths, row, 1)


@compiled
def lengthening(t: Tables, before: State, after: State) -> int:
    """By how many ns all paths together take longer if nothing waits."""
    total = 0
    for row in range(after.paths.shape[0]):
        if _differs(before.paths, after.paths, row):
            total += unloaded(t.times, t.wire, after.paths, row) - unloaded(t.times, t.wire, before.paths, row)
    return total


@inlined
def _differs(before: Ints, after: Ints, row: int) -> bool:
    differs = False
    for index in range(after.shape[1]):
        differs |= before[row, index] != after[row, index]
    return differs


@inlined
def _count(times: Ints, wire: Ints, gaps: Ints, sites: Ints, paths: Ints, row: int, sign: int) -> None:
    """Add a path to the tally, or take it out."""
    before, left = paths[row, 0], unloaded(times, wire, paths, row)
    sites[WORK, before] += sign * times[LOSS, before]
    for index in range(paths.shape[1]):
        site = paths[row, index]
        if index > 0:
            left -= wire[before, site] + wire[site, before]
        sites[HELD, site] += sign * (left // times[MEMORY, site])
        busy = times[FORWARD, site] + times[BACKWARD, site]
        sites[WORK, site] += sign * (busy + 2 * gaps[GAP])
        left -= busy
        before = site


@compiled
def estimate(sites: Ints, s: State) -> int:
    """Time of the busiest site or of the busiest slot of memory if nothing waits, plus the data nodes' mean slot."""
    worst, total, nodes, last = 0, 0, 0, 0
    for site in range(sites.shape[1]):
        if s.stage[site] == 0:
            total += sites[HELD, site]
            nodes += 1
        busy = max(sites[HELD, site], sites[WORK, site])
        if busy > worst:
            worst, last = busy, site
    s.last[0] = last
    return int(worst + total // nodes)
