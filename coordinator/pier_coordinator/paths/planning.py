"""A plan beside what it must be compared with: the full pipeline, placed as well, and the lower bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from pier_coordinator.paths.bounds import Bounds, lower_bounds
from pier_coordinator.paths.policies import Policy, full_pipeline
from pier_coordinator.paths.problem import Problem
from pier_coordinator.paths.routing import random_routes
from pier_coordinator.paths.schedule import Schedule
from pier_coordinator.paths.search import Found, search
from pier_coordinator.paths.simulate import simulate

FULL, SKIP = "full pipeline", "skip"
Told = Callable[[str, float, float], None]
"""Told what is being planned, the part that is done, and the best cost so far, seconds."""


@dataclass(frozen=True)
class Outcome:
    """`any_bounds` hold for every assignment of sites to stages, `bounds` for that of the plan."""

    policy: Policy
    problem: Problem
    found: Found
    schedule: Schedule
    full: Found
    any_bounds: Bounds
    bounds: Bounds

    @cached_property
    def gap(self) -> float:
        """How far the makespan is above the lower bound for any assignment: 0.1 is a tenth above."""
        return self.found.makespan_s / self.any_bounds.best_s - 1

    @cached_property
    def saved(self) -> float:
        """Of the full pipeline's time."""
        return 1 - self.found.iteration_s / self.full.iteration_s


def plan_paths(problem: Problem, policy: Policy, seed: int, seconds: float, told: Told) -> Outcome:
    """Plans by a policy; the search for each of the two plans takes so many seconds. Raises PierError."""
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
