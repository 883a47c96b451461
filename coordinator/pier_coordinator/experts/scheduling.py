"""Stage B, scheduling: which site takes which job, so that the last one is done soonest: R | eligibility | Cmax.

LPT, local search and, if needed, a solver.

Lower bounds on Cmax: LB1 to LB4 are cheap. For sites that differ in speed alone, the greater of LB1 (area) and LB3
(prefix) is the exact optimum of schedules that may interrupt and move jobs (Horvath, Lam and Sethi, J. ACM 24, 1977;
Gonzalez and Sahni, J. ACM 25, 1978). LB6 is the linear relaxation of Lenstra, Shmoys and Tardos (Math. Programming 46,
1990): the smallest T for which jobs can be split and placed within T, with x_ij = 0 where p_ij > T, so that no part of
a job goes where the whole job would take too long. No schedule is done before T, and one exists that is done by 2 T.

`longest_first` (LPT) takes the jobs by decreasing work and puts each where it is done first. For m equal sites the
result takes at most 4/3 - 1/(3m) times the optimum (Graham, SIAM J. Appl. Math. 17, 1969). If one site is faster, the
factor is (√3 + 1)/2; for speeds that are powers of 2 it is 1.4, for any speeds 1.577 (these three are unconfirmed).
`improved` brings the end of the last site forward. Without delaying it, `settled` then reduces first the sum of all
completion times and then the largest stretch: how much later a job is done than it would be alone at its best site. The
bytes transferred are the same for all schedules: every job fetches its seed model and its text, and sends its expert.

`solved` finds the best schedule with HiGHS: an integer programme that counts the jobs of each kind at each site.

    min T   s.t.   Σ_i n_ik = (jobs of kind k),   Σ_k p_ik n_ik <= T,   Σ_k p_ik n_ik <= window_i,   n integer

Jobs that take the same time at every site are of one kind. Which of them goes where does not matter, but a solver that
does not know about this symmetry tries all permutations. SciPy's interface to HiGHS accepts no initial schedule; an
upper bound from a known schedule helps nearly as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from pier_node.experts.mixture import Array

ROUNDING = 1e-9
INFEASIBLE = 2
"""The status of milp if there is no solution."""
NOTHING = 1e-9
"""Relative gains up to this are rounding errors."""
SWEEPS = 5
"""Maximum number of passes of `settled` over all jobs."""
Change = tuple[tuple[int, int], ...]
"""Jobs and the sites that they go to."""
Places = tuple[int, ...]
"""The site of each job, by index."""


@dataclass(frozen=True)
class Problem:
    """The jobs and the sites to place them at.

    Attributes:
        times: seconds that a job takes at a site, transfers included, [jobs, sites]; inf: it may not go there.
        work: FLOPs of a job, [jobs].
        speeds: greatest FLOP/s of a site, [sites]: times are at least work / speeds.
        windows: seconds for which a site is available, [sites]; inf: without limit.
    """

    times: Array
    work: Array
    speeds: Array
    windows: Array

    @classmethod
    def uniform(cls, work: Sequence[float], speeds: Sequence[float]) -> Self:
        """A problem in which any job may go anywhere and nothing is transferred."""
        jobs, sites = np.array(work, dtype=np.float64), np.array(speeds, dtype=np.float64)
        return cls(jobs[:, None] / sites, jobs, sites, np.full(len(sites), np.inf))

    def restricted(self, eligible: npt.NDArray[np.bool_]) -> Problem:
        """Return a copy in which jobs may only go where `eligible`, [jobs, sites], is true."""
        return replace(self, times=np.where(eligible, self.times, np.inf))

    @cached_property
    def alone(self) -> Array:
        """Seconds that a job takes at its fastest site, [jobs]."""
        return np.asarray(self.times.min(axis=1))

    @cached_property
    def eligible(self) -> npt.NDArray[np.bool_]:
        """Where a job may go, [jobs, sites]; not where the window is too short even for this job alone."""
        return np.asarray(np.isfinite(self.times) & (self.times <= self.windows))


def loads(problem: Problem, places: Places) -> Array:
    """Seconds that each site works, [sites]."""
    held = problem.times[np.arange(len(places)), np.array(places, dtype=np.intp)]
    return np.bincount(np.array(places, dtype=np.intp), held, len(problem.speeds)).astype(np.float64)


def makespan(problem: Problem, places: Places) -> float:
    """Cmax: seconds until the last site is done."""
    return float(loads(problem, places).max(initial=0.0))


def order(problem: Problem, places: Places, site: int) -> list[int]:
    """The jobs of a site in the order of training: the shortest first, so that experts are done early."""
    own = [job for job, place in enumerate(places) if place == site]
    return sorted(own, key=lambda job: (problem.times[job, site], job))


class NoPlaceError(Exception):
    """Some jobs (`jobs`, by index) fit at no site. If empty, all jobs together do not fit into the sites' windows."""

    def __init__(self, jobs: tuple[int, ...] = ()) -> None:
        super().__init__(f"no place for jobs {jobs}")
        self.jobs = jobs


@dataclass(frozen=True)
class Limits:
    """When the solver may stop.

    Attributes:
        seconds: time limit; the best schedule found by then counts.
        gap: relative gap to the optimum that is good enough.
    """

    seconds: float = 5.0
    gap: float = 0.01


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


@dataclass(frozen=True)
class Exact:
    """The solver's result.

    Attributes:
        places: the schedule; None: none was found.
        bound: seconds before which no schedule is done; inf: there is no schedule.
    """

    places: Places | None
    bound: float


def solved(problem: Problem, least: float, most: float, limits: Limits) -> Exact:
    """The best schedule with a makespan from `least` (a lower bound) to `most`, in seconds."""
    times = np.where(problem.eligible, problem.times, np.inf)
    kinds, kind_of = np.unique(times, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    counts = np.bincount(kind_of, minlength=len(kinds))
    found = milp(
        np.append(np.zeros(kinds.size), 1.0),
        integrality=np.append(np.ones(kinds.size), 0),
        bounds=Bounds(
            np.append(np.zeros(kinds.size), 1.0),
            np.append(np.where(np.isfinite(kinds), counts[:, None], 0).ravel(), most / least),
        ),
        constraints=_constraints(problem, np.where(np.isfinite(kinds), kinds, 0) / least, counts, least),
        options={"time_limit": limits.seconds, "mip_rel_gap": limits.gap},
    )
    if found.status == INFEASIBLE:
        return Exact(None, np.inf)
    bound = least if found.mip_dual_bound is None else max(least, float(found.mip_dual_bound) * least)
    if found.x is None:
        return Exact(None, bound)
    numbers = np.rint(found.x[:-1]).astype(int).reshape(kinds.shape)
    return Exact(_places(numbers, kind_of), bound)


def _constraints(problem: Problem, seconds: Array, counts: npt.NDArray[np.intp], unit: float) -> list[LinearConstraint]:
    kinds, sites = seconds.shape
    whole = np.kron(np.eye(kinds), np.ones(sites))
    busy = np.concatenate([np.diag(row) for row in seconds], axis=1)
    late = np.append(busy, -np.ones((sites, 1)), axis=1)
    rules = [
        LinearConstraint(np.append(whole, np.zeros((kinds, 1)), axis=1), counts, counts),
        LinearConstraint(late, -np.inf, 0),
    ]
    if np.isfinite(problem.windows).any():
        rules.append(LinearConstraint(np.append(busy, np.zeros((sites, 1)), axis=1), -np.inf, problem.windows / unit))
    return rules


def _places(numbers: npt.NDArray[np.intp], kind_of: npt.NDArray[np.intp]) -> Places:
    """Assign the jobs of each kind, in order, to the sites of that kind, in order."""
    sites = [iter(np.repeat(np.arange(numbers.shape[1]), row).tolist()) for row in numbers]
    return tuple(next(sites[kind]) for kind in kind_of)
