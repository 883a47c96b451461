"""Lower bounds on Cmax, in seconds: no schedule is done sooner.

LB1 to LB4 are cheap. For sites that differ in speed alone, the greater of LB1 (area) and LB3 (prefix) is the exact
optimum of schedules that may interrupt and move jobs (Horvath, Lam and Sethi, J. ACM 24, 1977; Gonzalez and Sahni,
J. ACM 25, 1978). LB6 is the linear relaxation of Lenstra, Shmoys and Tardos (Math. Programming 46, 1990): the smallest
T for which jobs can be split and placed within T, with x_ij = 0 where p_ij > T, so that no part of a job goes where the
whole job would take too long. No schedule is done before T, and one exists that is done by 2 T.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from pier_coordinator.experts.problem import Array, Problem


def lower_bounds(problem: Problem) -> dict[str, float]:
    """LB1 to LB4 by name, for one job or more."""
    return {"area": area(problem), "longest": longest(problem), "prefix": prefix(problem), "nested": nested(problem)}


def area(problem: Problem) -> float:
    """LB1: as if all sites worked all the time."""
    return float(problem.work.sum() / problem.speeds.sum())


def longest(problem: Problem) -> float:
    """LB2: as if every job were alone at its fastest site."""
    return float(np.where(problem.eligible, problem.times, np.inf).min(axis=1).max())


def prefix(problem: Problem) -> float:
    """LB3: k jobs use at most k sites; the k largest at the k fastest, for each k below the number of sites."""
    count = min(len(problem.work), len(problem.speeds) - 1)
    largest = np.sort(problem.work)[::-1][:count].cumsum()
    fastest = np.sort(problem.speeds)[::-1][:count].cumsum()
    return float((largest / fastest).max(initial=0.0))


def nested(problem: Problem) -> float:
    """LB4: jobs restricted to certain sites (large ones to those with enough memory) keep those sites busy."""
    eligible, best = problem.eligible, 0.0
    for allowed in np.unique(eligible, axis=0):
        bound = ~(eligible & ~allowed).any(axis=1)
        best = max(best, float(problem.work[bound].sum() / problem.speeds[allowed].sum()))
    return best


def relaxed(problem: Problem) -> float:
    """LB6, in seconds; inf if there is no schedule, 0 if there is no job."""
    times = np.where(problem.eligible, problem.times, np.inf)
    limits = np.unique(times[np.isfinite(times)])
    first, last = 0, len(limits)  # the first limit that is enough, if any
    while first < last:
        middle = (first + last) // 2
        enough = _needed(problem, times, limits[middle]) <= limits[middle]
        first, last = (first, middle) if enough else (middle + 1, last)
    # Between two limits the allowed places are the same: T may be what they need.
    below = _needed(problem, times, limits[first - 1]) if first else np.inf
    return float(min(below, limits[first] if first < len(limits) else np.inf)) if len(limits) else 0.0


def _needed(problem: Problem, times: Array, limit: float) -> float:
    """The makespan of the relaxation in which a job may only go where it takes at most `limit` seconds."""
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
