"""Scheduling: which site takes which job, and how good that is. LPT, local search and, if needed, the exact solver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pier_coordinator.experts.bounds import lower_bounds, relaxed
from pier_coordinator.experts.exact import Limits, solved
from pier_coordinator.experts.problem import Places, Problem, makespan
from pier_coordinator.experts.search import improved, longest_first, settled

ROUNDING = 1e-9


class NoPlaceError(Exception):
    """Some jobs (`jobs`, by index) fit at no site. If empty, all jobs together do not fit into the sites' windows."""

    def __init__(self, jobs: tuple[int, ...] = ()) -> None:
        super().__init__(f"no place for jobs {jobs}")
        self.jobs = jobs


@dataclass(frozen=True)
class Schedule:
    """A schedule and a bound on the best one.

    Attributes:
        places: the site of each job.
        makespan: seconds until the last site is done.
        bound: seconds before which no schedule is done.
        why: name of that bound.
    """

    places: Places
    makespan: float
    bound: float
    why: str

    @property
    def gap(self) -> float:
        """By what fraction it exceeds the bound: 0.01 is 1 %."""
        return self.makespan / self.bound - 1


def schedule(problem: Problem, limits: Limits) -> Schedule:
    """The best schedule found within the limits, for one job or more. Raises NoPlaceError."""
    if nowhere := np.flatnonzero(~problem.eligible.any(axis=1)).tolist():
        raise NoPlaceError(tuple(nowhere))
    quick = longest_first(problem)
    found = rated(problem, improved(problem, quick)) if quick else None
    if found is None or found.gap > max(limits.gap, ROUNDING):
        found = _exact(problem, found, limits)
    places = settled(problem, found.places)
    return _rated(problem, places, found.bound, found.why)


def rated(problem: Problem, places: Places) -> Schedule:
    """A given schedule, with the best of the bounds that need no integer solver."""
    return _rated(problem, places, *_bound(problem))


def _bound(problem: Problem) -> tuple[float, str]:
    bounds = {**lower_bounds(problem), "relaxed": relaxed(problem)}
    why = max(bounds, key=lambda name: bounds[name])
    return bounds[why], why


def _rated(problem: Problem, places: Places, bound: float, why: str) -> Schedule:
    end = makespan(problem, places)
    return Schedule(places, end, min(bound, end), why)


def _exact(problem: Problem, found: Schedule | None, limits: Limits) -> Schedule:
    bound, why = (found.bound, found.why) if found else _bound(problem)
    if not np.isfinite(bound):
        raise NoPlaceError
    eligible = np.where(problem.eligible, problem.times, 0)
    most = found.makespan if found else float(eligible.max(axis=1).sum())
    exact = solved(problem, bound, most * (1 + ROUNDING), limits)
    places = found.places if found else exact.places
    if exact.places and (found is None or makespan(problem, exact.places) < found.makespan):
        places = exact.places
    if places is None:
        raise NoPlaceError
    if bound < exact.bound < np.inf:
        bound, why = exact.bound, "solver"
    return _rated(problem, places, bound, why)
