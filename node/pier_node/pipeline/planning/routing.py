"""NoLoCo's random routing: permutations assign microbatches to the replicas of a stage (arXiv 2506.10911).

Microbatches visit a stage in groups as large as its number of replicas, each group in the order of a random
permutation. Each stage and group has its own permutation; with equally many replicas everywhere, that is one
permutation per boundary between stages. If the numbers differ, or if microbatches skip stages, the visitors of each
stage are counted separately. The remaining visitors at the end of a wave go to the sites with the lowest load so far,
so the load of a stage's replicas is equal within one.

The result is a pure function of the seed, the step and the names of the sites. Permutations are orders of hashes, as in
outer/noloco.py.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.plan import Path, Plan
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.start import Stages, stage_orders


def random_routes(problem: Problem, stages: Stages, seed: int, step: int) -> Plan:
    """The paths of one iteration over given stages. Raises PierError: a site cannot hold its share."""
    dice = random.Random(_draw(seed, step))
    load = [0] * len(problem.sites)
    waves = [
        _wave(problem, stages, stage_orders(problem, size, dice), load, f"{seed} {step} {wave}")
        for wave, size in enumerate(problem.wave_sizes)
    ]
    return Plan(stages, tuple(waves))


def _wave(problem: Problem, stages: Stages, orders: list[list[int]], load: list[int], draw: str) -> tuple[Path, ...]:
    turns = []
    for stage, sites in enumerate(stages):
        visitors = sum(stage in order for order in orders)
        _fits(problem, sites, stage, visitors)
        turns.append(iter(_dealt(problem, sites, visitors, load, f"{draw} {stage}")))
    return tuple(tuple(next(turns[stage]) for stage in order) for order in orders)


def _dealt(problem: Problem, sites: Sequence[int], visitors: int, load: list[int], draw: str) -> list[int]:
    """The site for each visitor of a stage, in order."""
    dealt: list[int] = []
    while len(dealt) < visitors:
        drawn = sorted(sites, key=lambda site: _draw(draw, len(dealt), problem.sites[site].name))
        least = {*sorted(drawn, key=lambda site: load[site])[: visitors - len(dealt)]}
        group = [site for site in drawn if site in least]
        for site in group:
            load[site] += 1
        dealt += group
    return dealt


def _fits(problem: Problem, sites: Sequence[int], stage: int, visitors: int) -> None:
    most = -(-visitors // len(sites))
    small = [it.name for it in (problem.sites[site] for site in sites) if it.memory < most]
    if small:
        raise PierError(
            f"memory cannot be kept: random paths bring {most} microbatches of a wave to each site of stage {stage}, "
            f"more than {', '.join(small)} can hold",
            "Use more waves, give the sites more memory, or plan the paths (skip instead of random).",
        )


def _draw(*key: object) -> bytes:
    return hashlib.sha256(" ".join(map(str, key)).encode()).digest()
