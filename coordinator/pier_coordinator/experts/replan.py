"""Planning anew while experts are being trained: when, and who goes on where (spec/hdee.md section 2.5).

An expert that moves is set up anew, fetches its checkpoint and does again what came after it. So it moves only where
all are done sooner in spite of that.
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
"""A site whose speed is off by more than this fraction was planned wrongly."""
CHECKPOINT = 12
"""Bytes a parameter: fp32 weights and AdamW's two moments."""


@dataclass(frozen=True)
class Remainder:
    """What is left of an expert.

    Attributes:
        left: FLOPs; replay: FLOPs since the last checkpoint that others can have, done again elsewhere.
        site: name of the one that has it; "": none, or one that is lost.
        begun: whether it is being trained there.
        kept: whether there is a checkpoint that others can have; otherwise all of it is done again elsewhere.
    """

    job: Job
    left: float
    replay: float = 0.0
    site: str = ""
    begun: bool = False
    kept: bool = False


def outdated(planned: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Why to plan anew: a site has come or is lost, or one is faster or slower than planned; "": not at all.

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
    """Where each one goes on. All stay where they are, unless it pays to move some.

    What has not begun moves if all are done sooner then, or as soon and most of them sooner; what is being trained only
    if all are done sooner. Moves that gain less than `limits.gap` are not worth it.

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
    """A schedule in which all stay at their sites; None: there is none, a window has become too short."""
    names = [site.name for site in sites]
    stays = np.array([[rest.site not in names or rest.site == name for name in names] for rest in remainders])
    try:
        return schedule(whole.restricted(stays), limits)
    except NoPlaceError:
        return None


def _is_worth_it(whole: Problem, new: Schedule, old: Schedule, gap: float) -> bool:
    """Whether all are done sooner, or as soon and the sum of their completion times is less, by the gap."""
    if new.makespan < old.makespan * (1 - gap):
        return True
    sums = [cost(whole, each.places, {*range(len(whole.speeds))})[0] for each in (new, old)]
    return new.makespan <= old.makespan * (1 + NOTHING) and sums[0] < sums[1] * (1 - gap)


def _times(remainders: Sequence[Remainder], sites: Sequence[Site]) -> Array:
    """Seconds until each expert is done and sent, [remainders, sites]; one that has begun where it is, is set up."""
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
