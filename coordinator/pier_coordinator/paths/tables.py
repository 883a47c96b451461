"""A problem and a plan as the arrays that the compiled core works on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pier_coordinator.paths.kernel import Ints, Tables
from pier_coordinator.paths.plan import Plan
from pier_coordinator.paths.problem import Problem

NANO = 1e9


def ticks(seconds: Sequence[float] | Sequence[Sequence[float]]) -> Ints:
    """Seconds, of any shape, in whole nanoseconds."""
    return np.rint(np.asarray(seconds, dtype=np.float64) * NANO).astype(np.int64)


def tables(problem: Problem) -> Tables:
    """A problem's times."""
    sites = problem.sites
    seconds = [[getattr(site, key) for site in sites] for key in ("forward_s", "backward_s", "loss_s")]
    memory = np.array([[site.memory for site in sites]], np.int64)
    uplink = ticks([problem.uplink_s or (0.0,) * len(sites)])
    gaps = ticks([problem.task_gap_s, problem.first_gap_s, problem.wave_s])
    return Tables(np.concatenate([ticks(seconds), memory, uplink]), ticks(problem.transfer_s), gaps)


def rows(plan: Plan) -> tuple[Ints, Ints]:
    """The paths of all microbatches [B, L], and the wave of each [B]."""
    numbers = [number for number, wave in enumerate(plan.waves) for _ in wave]
    return np.array(plan.paths, np.int64), np.array(numbers, np.int64)
