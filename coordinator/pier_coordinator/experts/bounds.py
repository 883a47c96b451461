"""No schedule is done sooner: lower bounds LB1 to LB4 on Cmax, in seconds (spec/hdee.md section 2.4).

For sites that differ in speed alone the better of area and prefix is the exact optimum of schedules that may interrupt
jobs and move them (Horvath, Lam and Sethi, J. ACM 24, 1977; Gonzalez and Sahni, J. ACM 25, 1978).
"""

from __future__ import annotations

import numpy as np

from pier_coordinator.experts.problem import Problem


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Each bound by name, for one job or more."""
    return {"area": area(problem), "longest": longest(problem), "prefix": prefix(problem), "nested": nested(problem)}


def area(problem: Problem) -> float:
    """LB1: all sites work all the time."""
    return float(problem.work.sum() / problem.speeds.sum())


def longest(problem: Problem) -> float:
    """LB2: every job is alone where it is fastest."""
    return float(np.where(problem.eligible, problem.times, np.inf).min(axis=1).max())


def prefix(problem: Problem) -> float:
    """LB3: k jobs are at k sites at most; the largest and the fastest, for each k below the number of sites."""
    count = min(len(problem.work), len(problem.speeds) - 1)
    largest = np.sort(problem.work)[::-1][:count].cumsum()
    fastest = np.sort(problem.speeds)[::-1][:count].cumsum()
    return float((largest / fastest).max(initial=0.0))


def nested(problem: Problem) -> float:
    """LB4: jobs that may only go to certain sites, as the large ones to those with memory, keep these busy."""
    eligible, best = problem.eligible, 0.0
    for allowed in np.unique(eligible, axis=0):
        bound = ~(eligible & ~allowed).any(axis=1)
        best = max(best, float(problem.work[bound].sum() / problem.speeds[allowed].sum()))
    return best
