"""A random first plan that is valid and evenly loaded, or the constraint that cannot be met."""

from __future__ import annotations

import random

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.plan import Path, Plan
from pier_node.pipeline.planning.problem import Problem, even_parts

TRIES = 50
Stages = tuple[tuple[int, ...], ...]


def random_plan(problem: Problem, seed: int) -> Plan:
    """A random valid plan, except for `max_intra_s`. Raises PierError: why there is none."""
    dice = random.Random(seed)
    stages = _assignment(problem, dice)
    return Plan(stages, random_waves(problem, stages, dice))


def random_waves(problem: Problem, stages: Stages, dice: random.Random) -> tuple[tuple[Path, ...], ...]:
    """Paths for a given assignment. Raises PierError."""
    return tuple(_wave(problem, stages, size, dice) for size in problem.wave_sizes)


def stage_loads(problem: Problem, size: int) -> tuple[int, ...]:
    """Visits of each stage in a wave of `size` microbatches; if not all are equal, larger numbers first."""
    return (size, *even_parts(size * (problem.path_length - 1), problem.stages - 1))


def _assignment(problem: Problem, dice: random.Random) -> Stages:
    """Assign sites with most memory first, each to the stage that needs most for its remaining places."""
    need = [*stage_loads(problem, problem.wave_sizes[0])]
    room = [*problem.stage_sizes]
    stages: list[list[int]] = [[] for _ in room]
    sites = sorted(range(len(problem.sites)), key=lambda site: (-problem.sites[site].memory, dice.random()))
    for site in sites:
        open_stages = [stage for stage, places in enumerate(room) if places]
        if not open_stages:
            break
        stage = max(open_stages, key=lambda it: (need[it] / room[it], dice.random()))
        stages[stage].append(site)
        room[stage] -= 1
        need[stage] -= problem.sites[site].memory
    for stage, lacking in enumerate(need):
        if lacking > 0:
            raise _too_little_memory(problem, stage, lacking)
    return tuple(tuple(sites) for sites in stages)


def _too_little_memory(problem: Problem, stage: int, lacking: int) -> PierError:
    load = stage_loads(problem, problem.wave_sizes[0])[stage]
    what = f"the {problem.stage_sizes[stage]} sites of stage {stage} shall hold {load} microbatches in a wave"
    return PierError(
        f"memory cannot be kept: {what}, and have places for {load - lacking}",
        "Use more waves or fewer microbatches, give the sites more memory, or the stage more sites (stage_sizes).",
    )


def stage_orders(problem: Problem, size: int, dice: random.Random) -> list[list[int]]:
    """The stages of each path of a wave of `size` microbatches, ascending. Raises PierError."""
    for _ in range(TRIES):
        orders = _orders(problem, size, dice)
        if orders is not None:
            return orders
    raise PierError(
        f"equal load cannot be kept: no paths of {problem.path_length} stages visit all {problem.stages} stages "
        f"equally often with jumps of at most {problem.rules.max_jump}",
        "Allow longer jumps (rules.max_jump), or make paths longer (path_length).",
    )


def _wave(problem: Problem, stages: Stages, size: int, dice: random.Random) -> tuple[Path, ...]:
    load, orders = [0] * len(problem.sites), stage_orders(problem, size, dice)
    return tuple(tuple(_least_busy(problem, stages[stage], load, dice) for stage in order) for order in orders)


def _orders(problem: Problem, size: int, dice: random.Random) -> list[list[int]] | None:
    """The stages of each path: always those with most visits left, as far as jumps allow."""
    left = [*stage_loads(problem, size)]
    later = left[1:]
    dice.shuffle(later)
    left[1:] = later
    orders = []
    for _ in range(size):
        order = _fullest(left, problem.path_length, problem.rules.max_jump, dice)
        if order is None:
            return None
        for stage in order:
            left[stage] -= 1
        orders.append(order)
    return orders if not any(left) else None


def _fullest(left: list[int], length: int, jump: int, dice: random.Random) -> list[int] | None:
    """The ascending stages with the largest sum of visits left; stages without visits left are not used."""
    weight = [dice.random() / len(left) + 4.0 ** min(count, 20) for count in left]
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(length - 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for stage, (value, order) in best.items():
            for after in range(stage + 1, min(stage + jump, len(left) - 1) + 1):
                found = value + weight[after]
                if left[after] > 0 and found > longer.get(after, (0.0, []))[0]:
                    longer[after] = (found, [*order, after])
        best = longer
    return max(best.values(), default=(0.0, None))[1]


def _least_busy(problem: Problem, sites: tuple[int, ...], load: list[int], dice: random.Random) -> int:
    """The site of a stage that would finish first with one more microbatch, among those with free memory."""
    free = [site for site in sites if load[site] < problem.sites[site].memory]
    chosen = min(free, key=lambda it: ((load[it] + 1) * problem.sites[it].forward_s, dice.random()))
    load[chosen] += 1
    return chosen
