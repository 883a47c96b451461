"""The three ways to plan: every stage (full), some stages on planned paths (skip), some on random ones (random)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pier_coordinator.paths.problem import Problem, Rules, stage_sizes
from pier_coordinator.paths.start import random_plan
from pier_node.errors import PierError

Policy = Literal["full", "skip", "random"]


def full_pipeline(problem: Problem) -> Problem:
    """The same sites and microbatches with paths through all stages; sites that are left over stay idle.

    It may need more waves: fewer sites create microbatches, and so hold fewer. Raises PierError: there is no plan.
    """
    sizes = stage_sizes(len(problem.sites), problem.stages, problem.stages)
    most = min(problem.microbatches, 4 * problem.waves * problem.stages)
    for waves in range(problem.waves, most):
        full = replace(problem, stage_sizes=sizes, path_length=problem.stages, waves=waves, rules=Rules(max_jump=1))
        try:
            random_plan(full, 0)
        except PierError:
            continue
        return full
    return replace(problem, stage_sizes=sizes, path_length=problem.stages, waves=most, rules=Rules(max_jump=1))
