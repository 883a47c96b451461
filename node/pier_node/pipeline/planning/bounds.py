"""Lower bounds on the time of an iteration, for a given assignment of sites to stages or for any assignment.

Every bound holds for every plan. So the gap between a plan and the largest bound limits what a better search could
gain. A path visits no stage twice, or no site, if stages are not given; limits on swaps are relaxed. The cheapest path
from each site is found in compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem, Site
from pier_node.pipeline.planning.simulator import Ints, compiled

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


TRIES = 1000
"""Branches of the search for a cheapest path, after which it is given up."""


@compiled
def cheapest(visit: Floats, hop: Floats, group: Ints, allowed: Bools, origin: int, walk: Ints, tries: int) -> float:
    """Cost of the cheapest closed path from a site over L - 1 others, of different groups; infinite if there is none.

    A search in depth, cut where even the cheapest walk for the rest of the path would make it too long. After so
    many tries it is left at that: the cost of the cheapest walk from there is a lower bound.

    Args:
        visit: [N], cost of visiting a site, except the origin.
        hop: [N, N], cost of going there and back.
        group: [N], index of each site in `allowed` [G, G], which says whether a path may go from one site to another.
        walk: [L], receives the sites of the path, or of that walk.
    """
    length, sites = len(walk), len(visit)
    cost, after = _rest(visit, hop, group, allowed, origin, length)
    bounds, path = np.full((length, sites), np.inf), np.full(length, origin, np.int64)
    spent, used = np.zeros(length), np.zeros(len(allowed), np.bool_)
    used[group[origin]] = True
    best, depth, branches = np.inf, 0, 0
    _branch(bounds[1], spent[0], hop, group, allowed, used, origin, cost[:, length - 2], after[:, length - 2])
    while depth >= 0:
        site, before = int(np.argmin(bounds[depth + 1])), path[depth]
        bound = bounds[depth + 1, site]
        if bound >= best:
            used[group[before]] = False
            depth -= 1
            continue
        bounds[depth + 1, site] = np.inf
        path[depth + 1] = site
        branches += 1
        if depth + 2 == length or branches > tries:
            for index in range(depth + 2, length):
                way = 1 if after[0, length - index, path[index - 1]] == path[index - 2] else 0
                path[index] = after[way, length - index, path[index - 1]]
            best, walk[:] = bound, path
            continue
        depth += 1
        spent[depth] = spent[depth - 1] + hop[before, site] + visit[site]
        used[group[site]] = True
        rest = length - 2 - depth
        _branch(bounds[depth + 1], spent[depth], hop, group, allowed, used, site, cost[:, rest], after[:, rest])
    return float(best)


@compiled
def _rest(visit: Floats, hop: Floats, group: Ints, allowed: Bools, origin: int, length: int) -> tuple[Floats, Ints]:
    """[2, L - 1, N]: cost of the cheapest walk from each site to the origin over so many others, and the next site.

    It never goes straight back to the site that it came from, so there are two: the cheapest, and the cheapest that
    goes elsewhere first.
    """
    sites = len(visit)
    cost, after = np.full((2, length - 1, sites), np.inf), np.full((2, length - 1, sites), -1, np.int64)
    for site in range(sites):
        if group[site] != group[origin]:
            cost[0, 0, site] = visit[site] + hop[site, origin]
    for rest in range(1, length - 1):
        for to in range(sites):
            if cost[0, rest - 1, to] == np.inf:
                continue
            for site in range(sites):
                if group[site] == group[origin] or site == to or not allowed[group[site], group[to]]:
                    continue
                way = 1 if after[0, rest - 1, to] == site else 0
                total = visit[site] + hop[site, to] + cost[way, rest - 1, to]
                if total < cost[0, rest, site]:
                    cost[1, rest, site], after[1, rest, site] = cost[0, rest, site], after[0, rest, site]
                    cost[0, rest, site], after[0, rest, site] = total, to
                elif total < cost[1, rest, site]:
                    cost[1, rest, site], after[1, rest, site] = total, to
    return cost, after


@compiled
def _branch(
    bounds: Floats,
    spent: float,
    hop: Floats,
    group: Ints,
    allowed: Bools,
    used: Bools,
    at: int,
    cost: Floats,
    after: Ints,
) -> None:
    """[N]: what a path costs at least if it goes on to each site."""
    for site in range(len(bounds)):
        bounds[site] = np.inf
        if allowed[group[at], group[site]] and not used[group[site]]:
            way = 1 if after[0, site] == at else 0
            bounds[site] = spent + hop[at, site] + cost[way, site]


TINY = 1e-300
"""Instead of a weight of 0, in a quotient."""
ROUNDS = 400
"""Steps of the ascent on the prices of sites. Any prices at its end give a valid bound."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the iteration time in seconds: by work, by memory, and by the capacity of sites.

    The last one starts from the others, so it is the best.
    """

    work_s: float
    memory_s: float
    load_s: float

    @property
    def best_s(self) -> float:
        """The largest bound."""
        return max(self.work_s, self.memory_s, self.load_s)


def lower_bounds(problem: Problem, plan: Plan | None = None) -> Bounds:
    """Bounds for all plans with this plan's assignment of sites to stages, or for all plans."""
    ground = _Ground.of(problem, plan)
    work, memory = _work(ground, plan), _memory(ground)
    return Bounds(work, memory, _load(ground, max(work, memory)))


@dataclass(frozen=True)
class _Ground:
    """The data that paths are built from.

    `origins`: the sites that may create microbatches; `sources` of them do. `needs`: see `_needs`.
    """

    problem: Problem
    busy: Floats
    hop: Floats
    group: Ints
    allowed: Bools
    origins: list[int]
    sources: int
    needs: Floats

    @classmethod
    def of(cls, problem: Problem, plan: Plan | None) -> _Ground:
        wire = np.array(problem.transfer_s)
        busy = np.array([site.forward_s + site.backward_s for site in problem.sites])
        sites, stages, first = len(problem.sites), problem.stages, problem.stage_sizes[0]
        if plan is None:
            anywhere = np.ones((sites, sites), np.bool_)
            group, needs = np.arange(sites), _needs(problem, ())
            return cls(problem, busy, wire + wire.T, group, anywhere, [*range(sites)], first, needs)
        group = np.full(sites, stages, np.int64)
        for site, stage in plan.stage_of().items():
            group[site] = stage
        needs = _needs(problem, plan.stages[0])
        return cls(problem, busy, wire + wire.T, group, _steps(problem), [*plan.stages[0]], first, needs)

    @cached_property
    def memory(self) -> Floats:
        """[N], the number of slots of each site."""
        return np.array([site.memory for site in self.problem.sites], np.float64)

    @cached_property
    def held(self) -> Floats:
        """[origins, count - 1]: the least time in which each origin can hold so many; infinite for too many."""
        sites, waves, free = self.problem.sites, self.problem.waves, np.zeros(len(self.problem.sites))
        rows = [_held(sites[it], self.path(it, free)[0], waves) for it in self.origins]
        longest = max(map(len, rows))
        return np.array([[*row, *[math.inf] * (longest - len(row))] for row in rows])

    @cached_property
    def times(self) -> Floats:
        """The times at which one more microbatch fits into some origin, or one more visit into a site, ascending."""
        return np.unique([*self.held[np.isfinite(self.held)], *self.needs[np.isfinite(self.needs)]])

    def later(self, time: float) -> float:
        """The first of these times after one."""
        at = int(np.searchsorted(self.times, time, side="right"))
        return float(self.times[at]) if at < len(self.times) else math.inf

    def most(self, time: float) -> Floats:
        """[origins], how many microbatches each can hold in that time."""
        return np.array([np.searchsorted(row, time, side="right") for row in self.held], np.float64)

    def capacity(self, time: float) -> Floats:
        """[N], how many visits each site can do in that time."""
        return np.asarray((self.needs <= time).sum(axis=1), np.float64)

    def enough(self, sites: list[int], visits: int) -> float:
        """The least time in which these sites can do so many visits together."""
        times = np.sort(self.needs[sites], axis=None)
        return float(times[visits - 1]) if visits and np.isfinite(times[visits - 1 :]).any() else 0.0

    def idle(self, time: float) -> Floats:
        """[origins], slot seconds of memory that each cannot use in an iteration of at least that time.

        The r-th of m slots is taken after r - 1 forwards. At the end, m - r backwards follow after the one that frees
        it. So m (m - 1) / 2 forwards and backwards are lost; both do not overlap in (m - 1) (forward + backward).
        """
        spare, busy = self.memory[self.origins] - 1, self.busy[self.origins]
        return np.where(time >= spare * busy, spare * (spare + 1) / 2 * busy, 0.0)

    def own(self, origin: int) -> float:
        """Seconds of work on a microbatch at its origin."""
        return float(self.busy[origin]) + self.problem.sites[origin].loss_s

    def path(self, origin: int, prices: Floats, factor: float = 1.0) -> tuple[float, Ints]:
        """The cheapest path: its time multiplied by `factor`, plus the prices of its other sites; and its sites."""
        walk = np.zeros(self.problem.path_length, np.int64)
        visit, hop = self.busy * factor + prices, self.hop * factor
        cost = cheapest(visit, hop, self.group, self.allowed, origin, walk, TRIES)
        return factor * self.own(origin) + cost, walk


def _steps(problem: Problem) -> Bools:
    """[S + 1, S + 1]: whether a path may go from one stage to another; the last index means no stage."""
    stages, rules = problem.stages, problem.rules
    back = min(rules.max_distance, rules.max_total) if rules.max_swaps else 0
    allowed = np.zeros((stages + 1, stages + 1), np.bool_)
    for before in range(stages):
        for after in range(1, stages):
            allowed[before, after] = before - back <= after <= before + back + rules.max_jump and before != after
    return allowed


def _work(ground: _Ground, plan: Plan | None) -> float:
    """Time until the sites, of each stage if these are known, can have done their visits, however they share them."""
    problem = ground.problem
    if plan is None:
        return ground.enough([*range(len(problem.sites))], problem.microbatches * problem.path_length)
    visits = sum(size * (problem.path_length - 1) // (problem.stages - 1) for size in problem.wave_sizes)
    later = (ground.enough([*sites], visits) for sites in plan.stages[1:])
    return max(ground.enough([*plan.stages[0]], problem.microbatches), *later)


def _needs(problem: Problem, data_nodes: Collection[int]) -> Floats:
    """[N, count - 1]: the least time in which each site can do so many visits; infinite for more than memory allows.

    A visit is a forward and a backward, and sends two tensors. The first leaves after a forward, each of the others
    once the uplink is free, and the last must still arrive.
    """
    sites, wire = problem.sites, np.array(problem.transfer_s)
    np.fill_diagonal(wire, np.inf)
    needs = np.full((len(sites), problem.waves * max(site.memory for site in sites)), np.inf)
    for index, site in enumerate(sites):
        count = np.arange(1, problem.waves * site.memory + 1)
        work = site.forward_s + site.backward_s + (site.loss_s if index in data_nodes else 0.0)
        uplink = problem.uplink_s[index] if problem.uplink_s else 0.0
        sent = site.forward_s + (2 * count - 1) * uplink + wire[index].min()
        needs[index, : len(count)] = np.maximum(count * work, sent)
    return needs


def _memory(ground: _Ground) -> float:
    """Smallest time in which the memory of the data nodes can hold all microbatches, each for its cheapest path."""
    low = 0.0
    for low in np.unique(ground.held[np.isfinite(ground.held)]):
        if np.sort(ground.most(low))[-ground.sources :].sum() >= ground.problem.microbatches:
            break
    return float(low)


def _held(site: Site, least: float, waves: int) -> list[float]:
    """The least time in which a data node can hold 1, 2, ... microbatches, if each takes at least `least`.

    Of q microbatches in m slots, one slot holds n = ceil(q / m); the r-th slot is first used after r - 1 forwards.
    """
    times = []
    for count in range(1, site.memory * waves + 1):
        turns = math.ceil(count / site.memory)
        last = count - site.memory * (turns - 1)
        times.append(min((last - 1) * site.forward_s + turns * least, (turns + 1) * least))
    return times


def _load(ground: _Ground, best: float) -> float:
    """How long the data nodes' memory is held if no site exceeds its capacity: a Lagrangian bound; or `best`.

    Each site i has a price u_i per visit, and each site o that may be a data node a weight l_o; of as many sites as
    there are data nodes, the weights sum to 1 at most. If an iteration takes T, no data node holds its m_o slots for
    longer. So for any such values, T is at least the sum over microbatches of the cheapest l_o / m_o * time + prices,
    minus the prices of all capacity, plus (1 - sum of l_o) T for the data nodes, however these are chosen. Three things
    raise it:

    - A data node takes no visits, so it pays for its whole capacity.
    - Its memory cannot be full from the first moment to the last (`_Ground.idle`).
    - It can hold only so many microbatches within a time T, and a site can compute and send only so many visits. Let T
      be a bound, and b > T the sum with the numbers that fit into T. Then no plan takes from T to b, as long as no more
      fit. So the lesser of b and of the time at which one more fits is a bound.

    Prices and weights ascend to the best bound.
    """
    prices, weights = np.zeros(len(ground.memory)), _even_weights(ground)
    origins, reach = ground.origins, 0.0
    for turn in range(ROUNDS):
        factor = (weights / ground.memory)[origins]
        cost, walks = _priced(ground, prices, factor)
        while True:
            capacity = ground.capacity(best)
            fixed = capacity[origins] * prices[origins] + factor * ground.idle(best) - weights[origins] * best
            value, counts, chosen = _shared_out(cost, ground.most(best), fixed, ground)
            value += best - float(prices @ capacity)
            if value <= best:
                break
            best = min(value, ground.later(best))
        held = counts * (cost - prices[walks[:, 1:]].sum(axis=1)) / np.maximum(factor, TINY) + ground.idle(best)
        turns = np.where(chosen, held / ground.memory[origins], best)
        weights[origins] *= np.exp((turns / best - 1) / (1 + turn / 8))
        weights /= np.sort(weights)[-ground.sources :].sum()
        slope = -capacity
        slope[origins] += capacity[origins] * chosen
        np.add.at(slope, walks[:, 1:], counts[:, None])
        slope[(prices == 0) & (slope < 0)] = 0.0
        reach = reach or value / ground.problem.microbatches
        step = 2 * reach / (1 + turn / 8)
        prices = np.maximum(0.0, prices + step * slope / max(1.0, float(np.abs(slope).sum())))
    return best


def _even_weights(ground: _Ground) -> Floats:
    """Weights in proportion to memory. If the data nodes are unknown, as if the sites with most memory were."""
    weights = np.zeros(len(ground.memory))
    weights[ground.origins] = ground.memory[ground.origins]
    total: float = np.sort(weights)[-ground.sources :].sum()
    return weights / total


def _priced(ground: _Ground, prices: Floats, factor: Floats) -> tuple[Floats, Ints]:
    """The cheapest path from each origin: what it costs, and its sites."""
    found = [ground.path(it, prices, float(own)) for it, own in zip(ground.origins, factor, strict=True)]
    return np.array([cost for cost, _ in found]), np.array([walk for _, walk in found])


def _shared_out(cost: Floats, most: Floats, fixed: Floats, ground: _Ground) -> tuple[float, Floats, Bools]:
    """A bound on the cost of the data nodes and their microbatches; and how many microbatches each has, and who is one.

    A price v per microbatch relaxes their total: an origin then costs fixed + most * min(0, cost - v), and the cheapest
    are chosen. Any v gives a bound, so it is enough to try the costs of the origins.
    """
    offers = np.unique(cost)
    gain = fixed + most * np.minimum(0.0, cost - offers[:, None])
    values = np.sort(gain, axis=1)[:, : ground.sources].sum(axis=1) + offers * ground.problem.microbatches
    at = int(np.argmax(values))
    chosen = np.zeros(len(cost), np.bool_)
    chosen[np.argsort(gain[at], kind="stable")[: ground.sources]] = True
    order = np.argsort(cost, kind="stable")
    filled = np.cumsum((most * chosen)[order])
    counts = np.zeros(len(cost))
    counts[order] = np.diff(np.minimum(filled, ground.problem.microbatches), prepend=0.0)
    return float(values[at]), counts, chosen
