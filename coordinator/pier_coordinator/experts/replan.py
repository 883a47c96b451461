"""Replanning while experts are being trained: when to replan, and where each expert continues.

An expert that moves must be set up again, fetch its checkpoint and repeat what came after it. It therefore moves only
if all experts are done sooner in spite of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pier_coordinator.experts.exact import Limits
from pier_coordinator.experts.jobs import Job
from pier_coordinator.experts.problem import Array, Problem
from pier_coordinator.experts.scheduling import NoPlaceError, Schedule, schedule
from pier_coordinator.experts.search import NOTHING, cost
from pier_coordinator.experts.task import Site

TOLERANCE = 0.1
"""If a site's speed differs from the plan by more than this fraction, the experts are planned again."""
CHECKPOINT = 12
"""Bytes per parameter: fp32 weights and AdamW's two moments."""


@dataclass(frozen=True)
class Remainder:
    """What is left of an expert.

    Attributes:
        job: the expert's job, or that of its chain.
        left: FLOPs that are left.
        replay: FLOPs since the last checkpoint available to other sites; another site must repeat them.
        site: name of the site that has it; "": no site, or one that is lost.
        begun: whether it is being trained there.
        kept: whether a checkpoint is available to other sites; otherwise another site starts from the beginning.
    """

    job: Job
    left: float
    replay: float = 0.0
    site: str = ""
    begun: bool = False
    kept: bool = False


def outdated(planned: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Why to replan: a site has joined or is lost, or is faster or slower than planned; "": no reason.

    Args:
        planned, measured: FLOP/s of the sites, by name.
    """
    for name in sorted(planned.keys() ^ measured.keys()):
        return f"{name} {'has come' if name in measured else 'is lost'}"
    for name, speed in sorted(planned.items()):
        if abs(measured[name] / speed - 1) > TOLERANCE:
            return f"{name} trains {measured[name] / speed:.2f} times as fast as planned"
    return ""


def replanned(remainders: Sequence[Remainder], sites: Sequence[Site], limits: Limits) -> Schedule:
    """Where each expert continues. All stay where they are unless it pays to move some.

    An expert that has not begun moves if the last one is then done sooner, or as soon with a smaller sum of completion
    times. An expert in training moves only if the last one is then done sooner. Gains below `limits.gap` do not count.

    Raises:
        NoPlaceError: see `schedule`.
    """
    whole = Problem(
        _times(remainders, sites),
        np.array([rest.left for rest in remainders]),
        np.array([site.speed for site in sites]),
        np.array([site.window for site in sites]),
    )
    free = schedule(whole, limits)
    found = _held(whole, remainders, sites, limits)
    later = _held(whole, [rest if rest.begun else replace(rest, site="") for rest in remainders], sites, limits)
    if found is None or (later and _is_worth_it(whole, later, found, limits.gap)):
        found = later
    return free if found is None or free.makespan < found.makespan * (1 - limits.gap) else found


def _held(whole: Problem, remainders: Sequence[Remainder], sites: Sequence[Site], limits: Limits) -> Schedule | None:
    """A schedule in which all stay at their sites; None: a window has become too short for one."""
    names = [site.name for site in sites]
    stays = np.array([[rest.site not in names or rest.site == name for name in names] for rest in remainders])
    try:
        return schedule(whole.restricted(stays), limits)
    except NoPlaceError:
        return None


def _is_worth_it(whole: Problem, new: Schedule, old: Schedule, gap: float) -> bool:
    """Whether the last expert is done sooner, or as soon with a smaller sum of completion times, by the gap."""
    if new.makespan < old.makespan * (1 - gap):
        return True
    sums = [cost(whole, each.places, {*range(len(whole.speeds))})[0] for each in (new, old)]
    return new.makespan <= old.makespan * (1 + NOTHING) and sums[0] < sums[1] * (1 - gap)


def _times(remainders: Sequence[Remainder], sites: Sequence[Site]) -> Array:
    """Seconds until each expert is done and sent, [remainders, sites]; no setup for one in training at its site."""
    return np.array(
        [[_seconds(rest, site) if rest.job.fits(site) else np.inf for site in sites] for rest in remainders]
    )


def _seconds(rest: Remainder, site: Site) -> float:
    here, size = rest.site == site.name, rest.job.size
    if here and rest.begun:
        return (rest.left + rest.job.judging) / site.speed + size.stored / site.line
    work = rest.left + (0.0 if here else rest.replay) + rest.job.judging
    moved = size.stored if here else rest.job.moved
    fetched = CHECKPOINT * size.parameters - (0.0 if here else size.stored) if rest.kept else 0.0
    return work / site.speed + rest.job.setup + (moved + fetched) / site.line
