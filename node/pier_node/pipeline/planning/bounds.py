"""Lower bounds on the time of an iteration, for a given assignment of sites to stages or for any assignment.

Every bound holds for every plan. So the gap between a plan and the largest bound limits what a better search could
gain. If swaps are allowed, paths are relaxed to walks that may return to a stage. The cheapest path from each site is a
shortest walk over layers of sites, in compiled code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import Ints, compiled

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@compiled
def cheapest(visit: Floats, hop: Floats, group: Ints, allowed: Bools, origin: int, walk: Ints) -> float:
    """Cost of the cheapest closed walk from a site over L - 1 others; infinite if there is none.

    It never goes straight back to the site that it came from, so each layer has two walks to a site: the cheapest, and
    the cheapest that comes from elsewhere.

    Args:
        visit: [N], cost of visiting a site, except the origin.
        hop: [N, N], cost of going there and back.
        group: [N], index of each site in `allowed` [G, G], which says whether a walk may go from one site to another.
        walk: [L], receives the sites of the walk.
    """
    sites, length = len(visit), len(walk)
    cost = np.full((2, length, sites), np.inf)
    came = np.full((2, length, sites), -1, np.int64)
    cost[0, 0, origin] = 0.0
    for layer in range(1, length):
        for before in range(sites):
            if cost[0, layer - 1, before] == np.inf:
                continue
            for site in range(sites):
                if site in (origin, before) or not allowed[group[before], group[site]]:
                    continue
                way = 1 if came[0, layer - 1, before] == site else 0
                total = cost[way, layer - 1, before] + hop[before, site] + visit[site]
                if total < cost[0, layer, site]:
                    cost[1, layer, site], came[1, layer, site] = cost[0, layer, site], came[0, layer, site]
                    cost[0, layer, site], came[0, layer, site] = total, before
                elif total < cost[1, layer, site]:
                    cost[1, layer, site], came[1, layer, site] = total, before
    last = int(np.argmin(cost[0, length - 1] + hop[:, origin]))
    found = cost[0, length - 1, last] + hop[last, origin]
    after = -1
    for layer in range(length - 1, -1, -1):
        walk[layer] = last
        before = came[1 if came[0, layer, last] == after else 0, layer, last]
        after, last = last, before
    return float(found)


ROUNDS = 400
"""Steps of the ascent on the prices of sites. Any prices at its end give a valid bound."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the iteration time in seconds: by work, by memory, and by the capacity of sites."""

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
    return Bounds(_work(problem, plan), _memory(ground), _load(ground))


@dataclass(frozen=True)
class _Ground:
    """The data that paths are built from. `origins`: the sites that may create microbatches; `sources` of them do."""

    problem: Problem
    busy: Floats
    hop: Floats
    group: Ints
    allowed: Bools
    origins: list[int]
    sources: int

    @classmethod
    def of(cls, problem: Problem, plan: Plan | None) -> _Ground:
        wire = np.array(problem.transfer_s)
        busy = np.array([site.forward_s + site.backward_s for site in problem.sites])
        sites, stages, first = len(problem.sites), problem.stages, problem.stage_sizes[0]
        if plan is None:
            anywhere = np.ones((1, 1), np.bool_)
            return cls(problem, busy, wire + wire.T, np.zeros(sites, np.int64), anywhere, [*range(sites)], first)
        group = np.full(sites, stages, np.int64)
        for site, stage in plan.stage_of().items():
            group[site] = stage
        return cls(problem, busy, wire + wire.T, group, _steps(problem), [*plan.stages[0]], first)

    def own(self, origin: int) -> float:
        """Seconds of work on a microbatch at its origin."""
        return float(self.busy[origin]) + self.problem.sites[origin].loss_s

    def path(self, origin: int, prices: Floats, factor: float = 1.0) -> tuple[float, Ints]:
        """The cheapest path: its time multiplied by `factor`, plus the prices of its other sites; and its sites."""
        walk = np.zeros(self.problem.path_length, np.int64)
        visit, hop = self.busy * factor + prices, self.hop * factor
        cost = cheapest(visit, hop, self.group, self.allowed, origin, walk)
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


def _work(problem: Problem, plan: Plan | None) -> float:
    """Time until the sites of a stage have done their microbatches, however they share them."""
    busy = [site.forward_s + site.backward_s for site in problem.sites]
    total = problem.microbatches
    if plan is None:
        return total * problem.path_length / sum(1 / it for it in busy)
    own = [busy[site] + problem.sites[site].loss_s for site in plan.stages[0]]
    later = [[busy[site] for site in sites] for sites in plan.stages[1:]]
    visits = sum(size * (problem.path_length - 1) // (problem.stages - 1) for size in problem.wave_sizes)
    return max(_shared(total, own), *(_shared(visits, it) for it in later))


def _shared(count: int, each: list[float]) -> float:
    return count / sum(1 / seconds for seconds in each)


def _memory(ground: _Ground) -> float:
    """Time until the memory of the data nodes has held all microbatches, each at least for its cheapest path.

    A data node with m slots and q microbatches holds n = ceil(q / m) of them in one slot; the r-th slot is first used
    after r - 1 forwards. The bound is the smallest time in which all microbatches fit, summed over the data nodes.
    """
    problem, free = ground.problem, np.zeros(len(ground.problem.sites))
    every = []
    for origin in ground.origins:
        site, least = problem.sites[origin], ground.path(origin, free)[0]
        most = site.memory * problem.waves
        every.append([_held(count, site.memory, site.forward_s, least) for count in range(1, most + 1)])
    low = 0.0
    times = sorted({time for row in every for time in row if math.isfinite(time)})
    for low in times:
        done = sorted((int(np.searchsorted(row, low, side="right")) for row in every), reverse=True)
        if sum(done[: ground.sources]) >= problem.microbatches:
            break
    return low


def _held(count: int, places: int, forward_s: float, least: float) -> float:
    turns = math.ceil(count / places)
    last = count - places * (turns - 1)
    return min((last - 1) * forward_s + turns * least, (turns + 1) * least)


def _load(ground: _Ground) -> float:
    """Mean time that the data nodes' memory is held if no site exceeds its capacity: a Lagrangian bound.

    Each site i has a price u_i per visit and each data node o a weight l_o; the weights sum to 1. For any such values,
    the sum over microbatches of the cheapest l_o / m_o * time + prices, minus the prices of all capacity, is a bound.
    Prices and weights ascend to the best bound.
    """
    problem = ground.problem
    memory = np.array([site.memory for site in problem.sites], np.float64)
    capacity = memory * problem.waves
    prices, weights = np.zeros(len(memory)), _even_weights(ground, memory)
    best, reach = 0.0, 0.0
    for turn in range(ROUNDS):
        value, load, held = _priced(ground, prices, weights / memory, capacity)
        reach = reach or value / problem.microbatches
        best = max(best, float(value))
        slope = load - capacity
        step = 2 * reach / (1 + turn / 8)
        prices = np.maximum(0.0, prices + step * slope / max(1.0, float(np.abs(slope).sum())))
        if len(ground.origins) == ground.sources and held.any():
            weights *= np.exp((held / memory / max(held / memory) - 1) * weights.astype(bool) / (1 + turn / 8))
            weights /= weights.sum()
    return best


def _even_weights(ground: _Ground, memory: Floats) -> Floats:
    """Weights in proportion to memory. If the data nodes are unknown, as if the sites with most memory were."""
    weights = np.zeros(len(memory))
    weights[ground.origins] = memory[ground.origins]
    total: float = np.sort(weights)[-ground.sources :].sum()
    return weights / total


def _priced(ground: _Ground, prices: Floats, factor: Floats, capacity: Floats) -> tuple[float, Floats, Floats]:
    """The bound for these prices, the visits of each site, and the time that each data node's memory is held."""
    load, held = np.zeros(len(prices)), np.zeros(len(prices))
    found = sorted(((*ground.path(it, prices, factor[it]), it) for it in ground.origins), key=lambda it: it[0])
    left, value = float(ground.problem.microbatches), -float(prices @ capacity)
    for cost, walk, origin in found[: ground.sources]:
        count = min(left, capacity[origin])
        left -= count
        value += count * cost
        np.add.at(load, walk[1:], count)
        held[origin] = count * (cost - prices[walk[1:]].sum()) / factor[origin]
    return value, load, held
