"""A first plan of circuits: groups of sites, one for each stage of a path, whose microbatches keep to themselves.

A site of a circuit sends to one site and receives from one, so few links matter, and all can be fast; and microbatches
seldom wait. An annealing forms circuits, by the time that they need for all microbatches. Each then gets as many as it
can do in that time, and a second annealing exchanges these, and the stages of circuits, until all stages have almost
equal load in every wave. Single microbatches make up for what is missing: they leave their circuit for one visit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pier_node.pipeline.planning.moves import Dice, below, dice, laws, uniform
from pier_node.pipeline.planning.plan import Path, Plan, fullest
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import Ints, compiled

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HOT, COLD = 0.003, 0.0001
"""First and last temperature of the first annealing, as fractions of the iteration."""
NEAR = 0.9
"""Probability that a step of it brings a site next to a near one."""
EXCHANGES = 300_000
"""Steps of the second."""
OTHER_STAGE = 0.2
"""Probability that a step of the second changes a stage of a circuit."""
TURN, DELAY, PLACES, RATE = range(4)
"""Rows of `figures`, whose columns are the circuits: seconds of a path, by how much the last microbatch follows the
first one because of the slowest site, microbatches in flight, and these per second.
"""


def circuits(problem: Problem, seed: int, steps: int) -> Plan | None:
    """A plan that is valid except for `max_intra_s`; None if none was found. `steps`: of the first annealing."""
    dealt, random_numbers, length = random.Random(seed), dice(seed), problem.path_length
    visits = _visits(problem, dealt)
    figures = np.zeros((4, len(visits)))
    order = np.array(dealt.sample(range(len(problem.sites)), len(problem.sites)), np.int64)
    field = Field.of(problem)
    time = gather(field, order, figures, steps, random_numbers)
    if not np.isfinite(time):
        return None
    places = figures[PLACES].astype(np.int64)
    turns = np.floor((time - figures[DELAY]) / figures[TURN] + ALMOST).astype(np.int64)
    most = places * np.clip(turns, 0, problem.waves)
    counts, rules = _shared_out(problem.wave_sizes, places, most), laws(problem)
    sizes, loads = np.array(problem.stage_sizes, np.int64), np.stack([rules.least, rules.most])
    limits = Limits(np.stack([places, most]), loads, sizes, rules.rules[-1:])
    balance(Shares.of(visits, counts), limits, random_numbers)
    stages: list[list[int]] = [[] for _ in sizes]
    paths = [tuple(row) for row in order[: len(visits) * length].reshape(-1, length).tolist()]
    for path, row in zip(paths, visits, strict=True):
        for site, stage in zip(path, np.flatnonzero(row), strict=True):
            stages[stage].append(site)
    rest = order[len(visits) * length :].tolist()
    for own, count in zip(stages, problem.stage_sizes, strict=True):
        while len(own) < count:
            own.append(rest.pop())
    waves = []
    for row in counts.tolist():
        wave = [path for path, count in zip(paths, row, strict=True) for _ in range(count)]
        if not _even_out(problem, stages, field.hop, wave):
            return None
        waves.append(tuple(wave))
    return Plan(tuple(tuple(sorted(own)) for own in stages), tuple(waves))


ALMOST = 1e-9
"""Against rounding."""


def _visits(problem: Problem, dealt: random.Random) -> Bools:
    """[G, S]: the stages of as many circuits as the stages have sites for."""
    left, found = [*problem.stage_sizes], []
    while left[0] and (order := fullest(left, problem.path_length, problem.rules.max_jump, dealt)):
        found.append([stage in order for stage in range(problem.stages)])
        for stage in order:
            left[stage] -= 1
    return np.array(found, np.bool_).reshape(-1, problem.stages)


def _shared_out(wave_sizes: tuple[int, ...], places: Ints, most: Ints) -> Ints:
    """[W, G]: microbatches of each circuit, first of those that have most turns left."""
    counts = np.zeros((len(wave_sizes), len(places)), np.int64)
    for own, size in zip(counts, wave_sizes, strict=True):
        for _ in range(size):
            left = (most - counts.sum(axis=0)) / places
            own[np.argmax(np.where(own < places, left, -np.inf))] += 1
    return counts


class Field(NamedTuple):
    """What circuits are formed from.

    Args:
        hop: [N, N], seconds of a visit and of the way to the next site and back.
        near: [N, N], the sites ordered by distance from each site, itself first.
        sites: [3, N]: seconds of the loss and of a visit, and memory.
        size: L, W, and the number of microbatches.
    """

    hop: Floats
    near: Ints
    sites: Floats
    size: Ints

    @classmethod
    def of(cls, problem: Problem) -> Field:
        """The field of a problem."""
        busy = np.array([site.forward_s + site.backward_s for site in problem.sites])
        sites = np.array([(site.loss_s, own, site.memory) for site, own in zip(problem.sites, busy, strict=True)])
        wire = np.array(problem.transfer_s)
        there_and_back = wire + wire.T
        np.fill_diagonal(there_and_back, -1.0)
        near = np.argsort(there_and_back, axis=1, kind="stable")
        size = np.array([problem.path_length, problem.waves, problem.microbatches], np.int64)
        return cls(there_and_back + busy[:, None], near, np.ascontiguousarray(sites.T), size)


@compiled
def gather(field: Field, order: Ints, figures: Floats, steps: int, dice: Dice) -> float:
    """Anneal which sites form circuits: the first L sites of `order` the first one, and so on; the last ones none.

    Returns the time that the circuits need, infinite if all their memory does not suffice.
    """
    hop, near, sites, (length, waves, microbatches) = field.hop, field.near, field.sites, field.size
    groups, place = figures.shape[1], np.argsort(order)
    for group in range(groups):
        _measure(hop, sites, order, length, figures, group)
    trial, start = figures.copy(), _needed(figures, waves, microbatches)[1]
    now = start
    for step in range(steps):
        i, j = _pair(near, order, place, groups * length, length, dice)
        order[i], order[j] = order[j], order[i]
        for it in (i, j):
            if it < groups * length:
                _measure(hop, sites, order, length, trial, it // length)
        limit = now - start * HOT * (COLD / HOT) ** (step / steps) * np.log(1.0 - uniform(dice))
        after, smooth = np.inf, _smooth(trial, microbatches)
        if smooth <= limit and _done(trial, waves, 2 * limit - smooth) >= microbatches:
            after = _needed(trial, waves, microbatches)[1]
        if after <= limit:
            now = after
            place[order[i]], place[order[j]] = i, j
        else:
            order[i], order[j] = order[j], order[i]
        for it in (i, j):
            if it < groups * length and after <= limit:
                figures[:, it // length] = trial[:, it // length]
            elif it < groups * length:
                trial[:, it // length] = figures[:, it // length]
    return float(_needed(figures, waves, microbatches)[0])


@compiled
def _pair(near: Ints, order: Ints, place: Ints, used: int, length: int, dice: Dice) -> tuple[int, int]:
    """Two places whose sites may be exchanged; mostly one gets a site near the one before or after it."""
    i = below(dice, len(order))
    if i >= used or uniform(dice) >= NEAR:
        return i, below(dice, len(order))
    beside = i // length * length + (i + (1 if uniform(dice) < 0.5 else length - 1)) % length
    return i, place[near[order[beside], 1 + int((len(order) - 1) * uniform(dice) ** 3)]]


@compiled
def _measure(hop: Floats, sites: Floats, order: Ints, length: int, figures: Floats, group: int) -> None:
    first = group * length
    turn, slowest, places = sites[0, order[first]], 0.0, np.inf
    for index in range(length):
        site = order[first + index]
        turn += hop[site, order[first + (index + 1) % length]]
        slowest, places = max(slowest, sites[1, site]), min(places, sites[2, site])
    figures[TURN, group], figures[DELAY, group], figures[PLACES, group] = turn, slowest * (places - 1), places
    figures[RATE, group] = places / turn


@compiled
def _smooth(figures: Floats, microbatches: int) -> float:
    """The time that circuits need if they could do parts of turns."""
    rate, late = 0.0, 0.0
    for group in range(figures.shape[1]):
        rate += figures[RATE, group]
        late += figures[RATE, group] * figures[DELAY, group]
    return (microbatches + late) / rate if rate > 0 else np.inf


@compiled
def _done(figures: Floats, waves: int, time: float) -> float:
    """How many microbatches circuits can do in whole turns."""
    done = 0.0
    for group in range(figures.shape[1]):
        turns = int((time - figures[DELAY, group]) / figures[TURN, group] + ALMOST)
        done += min(max(0, turns), waves) * figures[PLACES, group]
    return done


@compiled
def _needed(figures: Floats, waves: int, microbatches: int) -> tuple[float, float]:
    """The time that circuits need with whole turns; and its mean with the time that they would with parts of turns."""
    smooth = time = _smooth(figures, microbatches)
    while time < np.inf and _done(figures, waves, time) < microbatches:
        after = np.inf
        for group in range(figures.shape[1]):
            turns = max(0, int((time - figures[DELAY, group]) / figures[TURN, group] + ALMOST))
            if turns < waves:
                after = min(after, (turns + 1) * figures[TURN, group] + figures[DELAY, group])
        time = after
    return time, (time + smooth) / 2


class Shares(NamedTuple):
    """What circuits do.

    Args:
        visits: [G, S], their stages; held: [S], how many have each.
        counts: [W, G], their microbatches in each wave; total: [G], in all.
        load: [W, S], visits of each stage in each wave.
    """

    visits: Bools
    held: Ints
    counts: Ints
    total: Ints
    load: Ints

    @classmethod
    def of(cls, visits: Bools, counts: Ints) -> Shares:
        """The shares of circuits with these stages and microbatches."""
        return cls(visits, visits.sum(axis=0), counts, counts.sum(axis=0), counts @ visits)


class Limits(NamedTuple):
    """What they may do.

    Args:
        most: [2, G], microbatches in a wave, and in all.
        loads: [2, W, S], the least and the most visits of each stage in each wave.
        sizes: [S], sites of each stage.
        jump: [1], the longest step from a stage to the next.
    """

    most: Ints
    loads: Ints
    sizes: Ints
    jump: Ints


@compiled
def balance(shares: Shares, limits: Limits, dice: Dice) -> None:
    """Anneal circuits' stages and microbatches, until each stage's load is right in each wave, or nearly so."""
    off, groups = 0, len(shares.visits)
    for wave in range(shares.load.shape[0]):
        for stage in range(shares.load.shape[1]):
            load, least, most = shares.load[wave, stage], limits.loads[0, wave, stage], limits.loads[1, wave, stage]
            off += max(0, load - most, least - load)
    for step in range(EXCHANGES):
        if off == 0:
            break
        allowed = -0.5 * (1 - step / EXCHANGES) * np.log(1.0 - uniform(dice))
        a, b = below(dice, groups), below(dice, groups)
        if a != b and uniform(dice) < OTHER_STAGE:
            off += _restage(shares, limits, a, b, allowed, dice)
        elif a != b:
            off += _hand_over(shares, limits, a, b, allowed, dice)


@compiled
def _restage(s: Shares, limits: Limits, a: int, b: int, allowed: float, dice: Dice) -> int:
    """Circuit a changes a stage, or exchanges it with circuit b. Returns by how much loads are further off."""
    stages, both = s.visits.shape[1], uniform(dice) < 0.5
    x, y = 1 + below(dice, stages - 1), 1 + below(dice, stages - 1)
    if not s.visits[a, x] or s.visits[a, y]:
        return 0
    if s.visits[b, x] or not s.visits[b, y] if both else s.held[y] == limits.sizes[y]:
        return 0
    worse = 0
    for wave in range(len(s.counts)):
        change = s.counts[wave, a] - (s.counts[wave, b] if both else 0)
        worse += _moved(s.load, limits.loads, wave, x, -change) + _moved(s.load, limits.loads, wave, y, change)
    _swap(s, a, x, y)
    if both:
        _swap(s, b, y, x)
    if worse <= allowed and _in_reach(s.visits[a], limits.jump[0]) and _in_reach(s.visits[b], limits.jump[0]):
        return worse
    _swap(s, a, y, x)
    if both:
        _swap(s, b, x, y)
    return 0


@compiled
def _swap(s: Shares, group: int, x: int, y: int) -> None:
    """A circuit visits y instead of x."""
    s.visits[group, x], s.visits[group, y] = False, True
    s.held[x], s.held[y] = s.held[x] - 1, s.held[y] + 1
    for wave in range(len(s.counts)):
        s.load[wave, x] -= s.counts[wave, group]
        s.load[wave, y] += s.counts[wave, group]


@compiled
def _hand_over(s: Shares, limits: Limits, a: int, b: int, allowed: float, dice: Dice) -> int:
    """Circuit a hands a microbatch to b, for one of another wave or for none. Returns as `_restage` does."""
    wave, other = below(dice, len(s.counts)), below(dice, len(s.counts))
    if not s.counts[wave, a] or s.counts[wave, b] >= limits.most[0, b]:
        return 0
    if wave == other and s.total[b] >= limits.most[1, b]:
        return 0
    if wave != other and (not s.counts[other, b] or s.counts[other, a] >= limits.most[0, a]):
        return 0
    worse = 0
    for stage in range(s.visits.shape[1]):
        change = int(s.visits[b, stage]) - int(s.visits[a, stage])
        worse += _moved(s.load, limits.loads, wave, stage, change)
        if wave != other:
            worse += _moved(s.load, limits.loads, other, stage, -change)
    if worse > allowed:
        return 0
    _give(s, wave, a, b)
    if wave != other:
        _give(s, other, b, a)
    return worse


@compiled
def _give(s: Shares, wave: int, a: int, b: int) -> None:
    """Circuit a gives a microbatch of a wave to circuit b."""
    for stage in range(s.visits.shape[1]):
        s.load[wave, stage] += int(s.visits[b, stage]) - int(s.visits[a, stage])
    s.counts[wave, a], s.counts[wave, b] = s.counts[wave, a] - 1, s.counts[wave, b] + 1
    s.total[a], s.total[b] = s.total[a] - 1, s.total[b] + 1


@compiled
def _moved(load: Ints, loads: Ints, wave: int, stage: int, change: int) -> int:
    """By how much a stage's load is further off if it changes."""
    before, least, most = load[wave, stage], loads[0, wave, stage], loads[1, wave, stage]
    after = before + change
    return int(max(0, after - most, least - after) - max(0, before - most, least - before))


@compiled
def _in_reach(visits: Bools, jump: int) -> bool:
    before, near = 0, True
    for stage in range(len(visits)):
        if visits[stage]:
            near &= stage - before <= jump
            before = stage
    return near


def _even_out(problem: Problem, stages: list[list[int]], hop: Floats, wave: list[Path]) -> bool:
    """Make the loads of the stages after the first equal within one; or return False."""
    stage_of = {site: stage for stage, sites in enumerate(stages) for site in sites}
    load = Counter(site for path in wave for site in path)
    while True:
        visits = [sum(load[site] for site in sites) for sites in stages]
        fullest, emptiest = int(np.argmax(visits[1:])) + 1, int(np.argmin(visits[1:])) + 1
        if visits[fullest] - visits[emptiest] <= 1:
            return True
        free = [site for site in stages[emptiest] if load[site] < problem.sites[site].memory]
        found = min(_detours(problem, stage_of, hop, wave, (fullest, free)), default=None)
        if found is None:
            return False
        _, row, path = found
        load.subtract(wave[row])
        load.update(path)
        wave[row] = path


def _detours(
    problem: Problem, stage_of: dict[int, int], hop: Floats, wave: list[Path], change: tuple[int, list[int]]
) -> Iterator[tuple[float, int, Path]]:
    """Paths that visit one of some sites instead of a stage: how much longer they are, their row, and they."""
    stage, free = change
    for row, path in enumerate(wave):
        kept = [site for site in path if stage_of[site] != stage]
        if len(kept) == len(path) or not free or stage_of[free[0]] in (stage_of[site] for site in kept):
            continue
        for site in free:
            longer = tuple(sorted([*kept, site], key=stage_of.__getitem__))
            if all(stage_of[b] - stage_of[a] <= problem.rules.max_jump for a, b in pairwise(longer)):
                yield _time(hop, longer) - _time(hop, path), row, longer


def _time(hop: Floats, path: Path) -> float:
    return sum(float(hop[a, b]) for a, b in pairwise([*path, path[0]]))
