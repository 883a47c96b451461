"""Finds a plan: sites to stages and all paths together, by two annealings, each in a thread of its own.

All is counted in steps, so that a seed gives the same plan on every machine that is not too slow for the deadline.
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
"""What a thread does in a second: for each task it looks at all sites, and does as much again as for 30 of them."""
LEAST = 2000
Progress = Callable[[float, float], None]
"""Told the part that is done, and the seconds of the best plan so far."""


@dataclass(frozen=True)
class Phase:
    """A part of a search. Temperatures are parts of the makespan; `joint`: how often sites change stages."""

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
"""What each thread does. The first lets waves repeat each other at first, which is better where sites are many."""


@dataclass(frozen=True)
class Found:
    """A plan, and what it took: `complete` says that the deadline did not cut the search short."""

    plan: Plan
    makespan_s: float
    sync_s: float
    simulated: int
    seconds: float
    complete: bool

    @property
    def iteration_s(self) -> float:
        """Until the replicas of all stages are in step again."""
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
    """The best plan that can be found in some seconds.

    Args:
        seconds: sets the number of steps: as many as fit on an ordinary machine.
        current: a plan that is allowed, to be improved; from anywhere if there is none.
        told: called now and then, in the caller's thread.
        stages_stay: the sites of `current` keep their stages; only its paths are improved.
        deadline: seconds after which the search ends on a slow machine; `seconds` if there is none.

    Raises PierError: nothing is allowed, or replicas cannot be found that are near enough to each other.
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
    """A search in slices, SLICES in all."""
    for phase in way:
        total, slices = int(steps * phase.share), round(SLICES * phase.share)
        for index in range(slices):
            start, stop = total * index // slices, total * (index + 1) // slices
            yield Course(start, stop, total, phase.hot, phase.cold, phase.joint, phase.tied)


def _anneal(
    chains: Sequence[Chain], courses: Sequence[Sequence[Course]], deadline: float, told: Progress | None
) -> bool:
    """Runs all chains at once, slice by slice; returns whether they came to their ends."""
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
