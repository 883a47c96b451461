"""The problem that a run poses to the planner of paths: what [pipeline] says, for sites with their times."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pier.v1.peer_pb2 import Place
from pier_node.errors import PierError
from pier_node.pipeline.config import PipelineSection
from pier_node.pipeline.estimates import sites_of, with_times

if TYPE_CHECKING:
    from pier_coordinator.paths.plan import Plan
    from pier_coordinator.paths.problem import Problem

TRIES = 16
"""Draws of a first plan with so many waves."""


def posed(
    section: PipelineSection, places: Mapping[str, Place], round_trips: Mapping[str, float], seed: int
) -> tuple[Problem, Plan]:
    """The problem of sites that may hold any stage, as at the start of a run, and some plan.

    Args:
        places: of the sites, in the order of the problem; their stages are not looked at.
        round_trips: seconds, of the planner to others.

    Raises:
        PierError: too few sites, or too little memory.
    """
    from pier_coordinator.paths.problem import stage_sizes

    sizes = stage_sizes(len(places), section.stages, section.path_length)
    return drawn(section, sizes, section.path_length, places, round_trips, None, seed)


def drawn(
    section: PipelineSection,
    sizes: tuple[int, ...],
    length: int,
    places: Mapping[str, Place],
    round_trips: Mapping[str, float],
    stages: tuple[tuple[int, ...], ...] | None,
    seed: int,
) -> tuple[Problem, Plan]:
    """The problem, with as few waves as memory allows, and some plan; with `stages`, if sites keep theirs.

    Raises PierError: no number of waves is enough.
    """
    from pier_coordinator.paths.plan import Plan
    from pier_coordinator.paths.problem import Problem, Rules
    from pier_coordinator.paths.start import random_plan, random_waves

    apart = ((0.0,) * len(places),) * len(places)
    rules = Rules(max_swaps=section.swaps, max_jump=max(len(sizes) - 1, 1))
    for waves in range(1, section.microbatches + 1):
        blank = Problem(sites_of(places), apart, sizes, length, section.microbatches, waves, rules)
        problem = with_times(blank, places, round_trips)
        for number in range(seed, seed + TRIES):
            try:
                if stages is None:
                    return problem, random_plan(problem, number)
                return problem, Plan(stages, random_waves(problem, stages, random.Random(number)))
            except (PierError, ValueError):  # the least busy of no sites, because all are full
                continue
    raise PierError(
        f"no paths of {length} stages over stages of {[*sizes]} sites keep the memory of {section.memory} microbatches",
        "Raise pipeline.memory, or lower pipeline.skip.",
    )
