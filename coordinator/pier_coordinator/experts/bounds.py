"""No schedule is done sooner: lower bounds LB1 to LB4 on Cmax, in seconds (spec/hdee.md section 2.4).

For sites that differ in speed alone the better of area and prefix is the exact optimum of schedules that may interrupt
jobs and move them (Horvath, Lam and Sethi, J. ACM 24, 1977; Gonzalez and Sahni, J. ACM 25, 1978).

LB6: the linear relaxation in which jobs may be cut up, but no part goes where the whole would take too long.

Lenstra, Shmoys and Tardos (Math. Programming 46, 1990): the smallest T for which jobs can be cut up and placed within T
although x_ij = 0 where p_ij > T. No schedule is done before T, and there is one that is done by 2 T.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from pier_coordinator.experts.problem import Array, Problem


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


def relaxed(problem: Problem) -> float:
    """The bound, seconds; inf when there is no schedule at all, 0 when there is no job."""
    times = np.where(problem.eligible, problem.times, np.inf)
    limits = np.unique(times[np.isfinite(times)])
    first, last = 0, len(limits)  # the first limit that is enough, if any
    while first < last:
        middle = (first + last) // 2
        enough = _needed(problem, times, limits[middle]) <= limits[middle]
        first, last = (first, middle) if enough else (middle + 1, last)
    # Between two limits the same places are allowed: T may be what these need.
    below = _needed(problem, times, limits[first - 1]) if first else np.inf
    return float(min(below, limits[first] if first < len(limits) else np.inf)) if len(limits) else 0.0


def _needed(problem: Problem, times: Array, limit: float) -> float:
    """The makespan of the relaxation that uses places of `limit` seconds at most."""
    jobs, sites = np.nonzero(times <= limit)
    if len(np.unique(jobs)) < len(times):
        return np.inf
    parts, count = np.arange(len(jobs)), len(problem.speeds)
    busy = np.zeros((count, len(parts) + 1))
    busy[sites, parts] = times[jobs, sites] / limit
    closed = np.isfinite(problem.windows)
    windows, room = busy[closed], problem.windows[closed] / limit
    busy[:, -1] = -1
    whole = np.zeros((len(times), len(parts) + 1))
    whole[jobs, parts] = 1
    cost = np.append(np.zeros(len(parts)), 1.0)
    above, limits = np.concatenate([busy, windows]), np.append(np.zeros(count), room)
    found = linprog(cost, above, limits, whole, np.ones(len(times)))
    return float(found.fun) * limit if found.status == 0 else np.inf
