"""Longest processing time first, by earliest completion: a schedule in no time, within 4/3 of the best for equal sites.

Graham, SIAM J. Appl. Math. 17 (1969): at most (4/3 - 1/(3m)) of the optimum for m equal sites; for sites that differ in
speed see spec/hdee.md section 2.4.
"""

from __future__ import annotations

import numpy as np

from pier_coordinator.experts.problem import Places, Problem


def longest_first(problem: Problem) -> Places | None:
    """The schedule; None when a job fits in no window any more, which does not say that there is no schedule."""
    flexible = problem.eligible.sum(axis=1)
    finish = np.zeros(len(problem.speeds))
    places = [0] * len(problem.work)
    for job in sorted(range(len(places)), key=lambda job: (-problem.work[job], flexible[job], job)):
        done = finish + problem.times[job]
        done[done > problem.windows] = np.inf
        site = int(done.argmin())
        if not np.isfinite(done[site]):
            return None
        places[job], finish[site] = site, done[site]
    return tuple(places)
