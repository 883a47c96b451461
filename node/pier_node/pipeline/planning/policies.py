"""The three planning policies, and a plan compared with an equally well placed full pipeline and with lower bounds.

The policies are: every stage ("full"), some stages on planned paths ("skip"), and some stages on random paths
("random").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.bounds import Bounds, lower_bounds
from pier_node.pipeline.planning.plan import random_plan, random_routes
from pier_node.pipeline.planning.problem import Problem, Rules, stage_sizes
from pier_node.pipeline.planning.search import Found, search
from pier_node.pipeline.planning.simulator import Schedule, simulate

Policy = Literal["full", "skip", "random"]


def full_pipeline(problem: Problem) -> Problem:
    """The same sites and microbatches with paths through all stages; surplus sites stay idle.

    It may need more waves, because fewer sites create microbatches and so hold fewer. Raises PierError: there is no
    plan.
    """
    sizes = stage_sizes(len(problem.sites), problem.stages, problem.stages)
    most = min(problem.microbatches, 4 * problem.waves * problem.stages)
    full = replace(problem, stage_sizes=sizes, path_length=problem.stages, rules=Rules(max_jump=1))
    for waves in range(problem.waves, most):
        wider = replace(full, waves=waves)
        with suppress(PierError):
            random_plan(wider, 0)
            return wider
    return replace(full, waves=most)


FULL, SKIP = "full pipeline", "skip"
Told = Callable[[str, float, float], None]
"""Called with the plan being searched, the fraction done, and the best cost so far in seconds."""


@dataclass(frozen=True)
class Outcome:
    """`any_bounds` hold for every assignment of sites to stages, `bounds` for the plan's assignment."""

    policy: Policy
    problem: Problem
    found: Found
    schedule: Schedule
    full: Found
    any_bounds: Bounds
    bounds: Bounds

    @cached_property
    def gap(self) -> float:
        """How far the makespan is above the lower bound for any assignment: 0.1 is 10 % above."""
        return self.found.makespan_s / self.any_bounds.best_s - 1

    @cached_property
    def saved(self) -> float:
        """Saved fraction of the full pipeline's iteration time."""
        return 1 - self.found.iteration_s / self.full.iteration_s


def plan_paths(problem: Problem, policy: Policy, seed: int, seconds: float, told: Told) -> Outcome:
    """Plan by a policy. The search for each of the two plans takes that many seconds. Raises PierError."""
    whole = full_pipeline(problem)
    full = search(whole, seed, seconds, told=partial(told, FULL))
    if policy == "full":
        return _outcome(policy, whole, full, full)
    found = search(problem, seed, seconds, told=partial(told, SKIP))
    if policy == "random":
        plan = random_routes(problem, found.plan.stages, seed, step=0)
        schedule = simulate(problem, plan)
        found = Found(plan, schedule.makespan_s, found.sync_s, found.simulated, found.seconds, found.complete)
    return _outcome(policy, problem, found, full)


def _outcome(policy: Policy, problem: Problem, found: Found, full: Found) -> Outcome:
    bounds = lower_bounds(problem), lower_bounds(problem, found.plan)
    return Outcome(policy, problem, found, simulate(problem, found.plan), full, *bounds)
