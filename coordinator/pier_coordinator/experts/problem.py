"""The problem of assigning jobs to sites so that the last one is done soonest: R | eligibility | Cmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
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
