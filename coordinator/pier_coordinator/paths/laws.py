"""What is allowed, compiled, for the search; check.py says the same in words, and apart from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pier_coordinator.paths.compiled import compiled
from pier_coordinator.paths.kernel import MEMORY, Ints
from pier_coordinator.paths.problem import Problem

MAX_SWAPS, MAX_DISTANCE, MAX_TOTAL, MAX_JUMP = range(4)


class Laws(NamedTuple):
    """`least` and `most` [W, S]: visits of each stage in a wave; `rules` [4]: of the order of stages in a path."""

    least: Ints
    most: Ints
    rules: Ints


def laws(problem: Problem) -> Laws:
    """Of a problem."""
    rules, later = problem.rules, problem.stages - 1
    visits = [size * (problem.path_length - 1) for size in problem.wave_sizes]
    least = [[size, *[count // later] * later] for size, count in zip(problem.wave_sizes, visits, strict=True)]
    most = [[size, *[-(-count // later)] * later] for size, count in zip(problem.wave_sizes, visits, strict=True)]
    limits = [rules.max_swaps, rules.max_distance, rules.max_total, rules.max_jump]
    return Laws(np.array(least, np.int64), np.array(most, np.int64), np.array(limits, np.int64))


@compiled
def lawful_path(rules: Ints, stages: int, stage: Ints, paths: Ints, row: int) -> bool:
    """Whether the stages of a path come in an order that is allowed, each once, stage 0 first."""
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


@compiled
def lawful_loads(laws: Laws, times: Ints, stage: Ints, paths: Ints, first: Ints, load: Ints) -> bool:
    """Whether memory suffices and stages are equally loaded.

    Args:
        first: [W + 1], where each wave begins in `paths`, and the end.
        load: [N + S], scratch.
    """
    sites, stages = times.shape[1], laws.least.shape[1]
    for wave in range(len(first) - 1):
        load[:] = 0
        for row in range(first[wave], first[wave + 1]):
            for index in range(paths.shape[1]):
                load[paths[row, index]] += 1
                load[sites + stage[paths[row, index]]] += 1
        for site in range(sites):
            if load[site] > times[MEMORY, site]:
                return False
        for it in range(stages):
            if load[sites + it] < laws.least[wave, it] or load[sites + it] > laws.most[wave, it]:
                return False
    return True
