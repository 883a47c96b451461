"""Heuristic schedules: longest processing time first (LPT), then a local search by moves of one job and swaps of two.

`longest_first` takes the jobs by decreasing work and puts each where it is done first. For m equal sites the result
takes at most 4/3 - 1/(3m) times the optimum (Graham, SIAM J. Appl. Math. 17, 1969). If one site is faster, the factor
is (√3 + 1)/2; for speeds that are powers of 2 it is 1.4, for any speeds 1.577 (these three are unconfirmed).

`improved` brings the end of the last site forward. Without delaying it, `settled` then reduces first the sum of all
completion times and then the largest stretch: how much later a job is done than it would be alone at its best site. The
bytes transferred are the same for all schedules: every job fetches its seed model and its text, and sends its expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from pier_coordinator.experts.problem import Array, Places, Problem, loads, order


def longest_first(problem: Problem) -> Places | None:
    """The LPT schedule; None if a job no longer fits in any window. There may be another schedule even then."""
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


NOTHING = 1e-9
"""Relative gains up to this are rounding errors."""
SWEEPS = 5
"""Maximum number of passes of `settled` over all jobs."""

Change = tuple[tuple[int, int], ...]
"""Jobs and the sites that they go to."""


def improved(problem: Problem, places: Places) -> Places:
    """Change the jobs of the site that ends last while it and the sites it changes with end sooner than it did."""
    while change := _best_change(problem, places):
        places = _changed(places, change)
    return places


def settled(problem: Problem, places: Places) -> Places:
    """A schedule that ends no later and is better by the sum of completion times, then by the largest stretch."""
    latest = float(loads(problem, places).max(initial=0.0)) * (1 + NOTHING)
    for _ in range(SWEEPS):
        before = places
        for job in range(len(places)):
            ends = loads(problem, places)
            for change in _changes(problem, places, job):
                if _is_better(problem, places, change, ends, latest):
                    places = _changed(places, change)
                    break
        if places == before:
            break
    return places


def cost(problem: Problem, places: Places, sites: set[int]) -> tuple[float, float]:
    """The sum of completion times (seconds) and the largest stretch of the jobs at some sites."""
    completions, stretch = 0.0, 0.0
    for site in sites:
        own = order(problem, places, site)
        for done, alone in zip(accumulate(problem.times[own, site].tolist()), problem.alone[own].tolist()):
            completions += done
            stretch = max(stretch, done / alone)
    return completions, stretch


def _best_change(problem: Problem, places: Places) -> Change | None:
    """The change after which the later of the changed sites ends soonest; None: no change helps."""
    ends = loads(problem, places)
    last = int(ends.argmax())
    best, found = float(ends[last]) * (1 - NOTHING), None
    for job in order(problem, places, last):
        for change in _changes(problem, places, job):
            after = _ends(problem, places, ends, change)
            touched = [last, *(site for _, site in change)]
            latest = float(after[touched].max())
            if latest < best and (after <= problem.windows).all():
                best, found = latest, change
    return found


def _changes(problem: Problem, places: Places, job: int) -> Iterator[Change]:
    """All allowed moves of a job, and all its allowed swaps with other jobs."""
    here, eligible = places[job], problem.eligible
    yield from (((job, site),) for site in range(len(problem.speeds)) if site != here and eligible[job, site])
    for other, there in enumerate(places):
        if there != here and eligible[job, there] and eligible[other, here]:
            yield (job, there), (other, here)


def _is_better(problem: Problem, places: Places, change: Change, ends: Array, latest: float) -> bool:
    after = _ends(problem, places, ends, change)
    if after.max() > latest or (after > problem.windows).any():
        return False
    sites = {site for job, there in change for site in (there, places[job])}
    for new, old in zip(cost(problem, _changed(places, change), sites), cost(problem, places, sites)):
        if abs(new - old) > NOTHING * old:
            return new < old
    return False


def _ends(problem: Problem, places: Places, ends: Array, change: Change) -> Array:
    """When each site is done after a change, [sites]; `ends` holds the times before it."""
    after = ends.copy()
    for job, site in change:
        after[places[job]] -= problem.times[job, places[job]]
        after[site] += problem.times[job, site]
    return after


def _changed(places: Places, change: Change) -> Places:
    after = list(places)
    for job, site in change:
        after[job] = site
    return tuple(after)
