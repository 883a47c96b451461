"""Finds the best schedule with HiGHS: an integer programme that counts the jobs of each kind at each site.

    min T   s.t.   Σ_i n_ik = (jobs of kind k),   Σ_k p_ik n_ik <= T,   Σ_k p_ik n_ik <= window_i,   n integer

Jobs that take the same time at every site are of one kind. Which of them goes where does not matter, but a solver that
does not know about this symmetry tries all permutations. SciPy's interface to HiGHS accepts no initial schedule; an
upper bound from a known schedule helps nearly as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from pier_coordinator.experts.problem import Array, Places, Problem

INFEASIBLE = 2
"""The status of milp if there is no solution."""


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
