"""Finds a plan: assigns sites to stages and plans all paths together, by two annealings in a thread each.

Work is counted in steps. So a seed gives the same plan on every machine that is fast enough for the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.anneal import Chain, Course
from pier_node.pipeline.planning.plan import Plan, sync_seconds, worst_intra
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulate import makespan
from pier_node.pipeline.planning.start import random_plan

SLICES = 100
SPEED, FIXED_COST = 1.2e9, 30
"""Work of a thread per second: for each task it looks at all sites, plus a fixed cost equal to 30 sites."""
LEAST = 2000
Progress = Callable[[float, float], None]
"""Called with the fraction done and the cost of the best plan so far, in seconds."""


@dataclass(frozen=True)
class Phase:
    """A part of a search. Temperatures are fractions of the makespan; `joint`: fraction of steps that move sites."""

    share: float
    hot: float
    cold: float
    joint: float
    tied: bool


TIED_FIRST = (Phase(0.5, 0.02, 0.002, 0.3, True), Phase(0.5, 0.006, 0.0005, 0.15, False))
FREE = (Phase(1.0, 0.01, 0.0005, 0.2, False),)
AGAIN = (Phase(1.0, 0.006, 0.0005, 0.1, False),)
PATHS_ONLY = (Phase(1.0, 0.006, 0.0005, 0.0, False),)
FROM_ANYWHERE, FROM_CURRENT, STAGES_STAY = (TIED_FIRST, FREE), (AGAIN, AGAIN), (PATHS_ONLY, PATHS_ONLY)
"""The phases of each thread. The first thread begins with repeating waves, which is better with many sites."""


@dataclass(frozen=True)
class Found:
    """A plan and the cost of finding it. `complete`: the deadline did not cut the search short."""

    plan: Plan
    makespan_s: float
    sync_s: float
    simulated: int
    seconds: float
    complete: bool

    @property
    def iteration_s(self) -> float:
        """Time until the replicas of all stages are synced again."""
        return self.makespan_s + self.sync_s


def search(
    problem: Problem,
    seed: int = 1,
    seconds: float = 10.0,
    current: Plan | None = None,
    told: Progress | None = None,
    deadline: float | None = None,
    stages_stay: bool = False,
) -> Found:
    """The best plan that can be found in that many seconds.

    Args:
        seconds: sets the number of steps, as many as fit on an ordinary machine.
        current: a valid plan to improve; None: start from anywhere.
        told: called from time to time, in the caller's thread.
        stages_stay: the sites of `current` keep their stages; only its paths are improved.
        deadline: seconds after which the search ends on a slow machine; None: `seconds`.

    Raises:
        PierError: no plan is valid, or no replicas are close enough to each other.
    """
    began = time.monotonic()
    ways = FROM_ANYWHERE if current is None else STAGES_STAY if stages_stay else FROM_CURRENT
    seeds = [seed * len(ways) + it for it in range(len(ways))]
    chains = [Chain.of(problem, current or random_plan(problem, it), it) for it in seeds]
    tasks = problem.microbatches * (2 * problem.path_length + 1)
    steps = max(LEAST, int(seconds * SPEED / tasks / (FIXED_COST + len(problem.sites))))
    complete = _anneal(chains, [[*_courses(way, steps)] for way in ways], began + (deadline or seconds), told)
    plan = min(chains, key=lambda it: it.cost_s).plan
    _near_enough(problem, plan)
    simulated, took = sum(it.simulated for it in chains), time.monotonic() - began
    return Found(plan, makespan(problem, plan), sync_seconds(problem, plan), simulated, took, complete)


def _courses(way: Sequence[Phase], steps: int) -> Iterator[Course]:
    """The slices of a search, SLICES in total."""
    for phase in way:
        total, slices = int(steps * phase.share), round(SLICES * phase.share)
        for index in range(slices):
            start, stop = total * index // slices, total * (index + 1) // slices
            yield Course(start, stop, total, phase.hot, phase.cold, phase.joint, phase.tied)


def _anneal(
    chains: Sequence[Chain], courses: Sequence[Sequence[Course]], deadline: float, told: Progress | None
) -> bool:
    """Run all chains in parallel, slice by slice. Returns whether they completed."""
    with ThreadPoolExecutor(len(chains)) as pool:
        for done, parts in enumerate(zip(*courses, strict=True), 1):
            list(pool.map(Chain.run, chains, parts))
            if told:
                told(done / SLICES, min(it.cost_s for it in chains))
            if time.monotonic() > deadline:
                return done == SLICES
    return True


def _near_enough(problem: Problem, plan: Plan) -> None:
    cap, worst = problem.max_intra_s, worst_intra(problem.transfer_s, plan)
    if cap is not None and worst > cap:
        raise PierError(
            f"no stages found whose sites are at most {cap:g} s apart (max_intra_s); the nearest: {worst:.3g} s",
            "Allow more, or search longer.",
        )
