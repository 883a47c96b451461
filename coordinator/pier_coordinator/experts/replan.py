"""Replanning while experts are being trained: which sites are there and how fast, when to replan, and what moves where.

An expert that moves must be set up again, fetch its checkpoint and repeat what came after it. It therefore moves only
if all experts are done sooner in spite of that.

A site that joins the run after the plan was accepted trains experts as well. A site that was in the run before and is
not in the plan was left out on purpose. A site's speed is measured from its progress reports, as the mean over its last
sufficiently long stretch of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pier_coordinator.experts.recipe import Job
from pier_coordinator.experts.scheduling import NOTHING, Limits, NoPlaceError, Problem, Schedule, cost, schedule
from pier_coordinator.experts.task import Site, Size
from pier_coordinator.store.experts import AcceptedPlan, Expert

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator

TOLERANCE = 0.1
"""If a site's speed differs from the plan by more than this fraction, the experts are planned again."""
CHECKPOINT = 12
"""Bytes per parameter: fp32 weights and AdamW's two moments."""
STEPS, SECONDS = 20, 10.0
"""Minimum steps and seconds of a stretch: a shorter measurement is mostly noise."""
Chain = list[int]
"""Numbers of jobs that one site trains one after the other; most chains have one job."""


@dataclass(frozen=True)
class Mark:
    """Where a stretch began: the job, its step, and the seconds that the site has trained it since the site's start."""

    job: int
    step: int
    seconds: float


class Paces:
    """The measured training speeds of all sites, by node id."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._speeds: dict[str, float] = {}

    def heard(self, node: str, job: int, step: int, seconds: float, flops: float) -> None:
        """Take in a site's progress with an expert; `flops` are those of one step.

        A site that was restarted or paused counts its seconds from 0 again, so a new stretch begins.
        """
        mark = self._marks.get(node)
        if mark is None or mark.job != job or step < mark.step or seconds < mark.seconds:
            self._marks[node] = Mark(job, step, seconds)
        elif step - mark.step >= STEPS and seconds - mark.seconds >= SECONDS:
            self._speeds[node] = flops * (step - mark.step) / (seconds - mark.seconds)
            self._marks[node] = Mark(job, step, seconds)

    def speed(self, node: str) -> float | None:
        """A site's speed in FLOP/s; None: not measured yet."""
        return self._speeds.get(node)


class ExpertSites:
    """The sites that train the experts of one plan.

    Args:
        accepted: when the plan was accepted, seconds since the epoch.

    Attributes:
        lost: node ids of the sites that have been silent for too long and still are.
        paces: the measured speeds of the sites.
    """

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float) -> None:
        self._of, self._plan, self._accepted = coordinator, plan, accepted
        self._planned = {site.name: site for site in plan.sites}
        self._known = {site.node: site.name for site in plan.sites if site.node}
        self._speeds = {site.name: site.speed for site in plan.sites}
        self._silent: dict[str, float] = {}
        self.lost: set[str] = set()
        self.paces = Paces()

    def names(self) -> dict[str, str]:
        """Node ids of these sites, by the name that the plan has for them, whatever they call themselves now."""
        there = {node: site for node, site in self._of.sites.items() if site.revoked_at is None}
        named = {name: node for node, name in self._known.items() if node in there}
        joined = [site for node, site in there.items() if node not in self._known and site.enrolled_at > self._accepted]
        return named | {site.node if site.name in named else site.name: site.node for site in joined}

    def labels(self) -> dict[str, str]:
        """The name that the plan has for each site of the run, by node id."""
        own = {node: name for name, node in self.names().items()}
        return {node: own.get(node) or self._known.get(node, site.name) for node, site in self._of.sites.items()}

    def here(self) -> list[Site]:
        """The live sites with their measured speeds.

        A site without a measurement is assumed to deviate from the plan by the same factor as the others (geometric
        mean).
        """
        names = self.names()
        measured = {name: speed for name, node in names.items() if (speed := self.paces.speed(node))}
        known = [measured[name] / site.speed for name, site in self._planned.items() if name in measured]
        off = math.exp(sum(map(math.log, known)) / len(known)) if known else 1.0
        return [
            self._site(name, measured.get(name) or self._base(name) * off)
            for name, node in names.items()
            if self._of.registry.is_here(node)
        ]

    def look(self, now: float, nodes: Iterable[str]) -> set[str]:
        """The sites that were lost since the last look; `now` is in seconds on any monotonic clock."""
        self.lost = {node for node in self.lost if not self._of.registry.is_here(node)}
        missed = {node for node in (*nodes, *self.lost) if not self._of.registry.is_here(node)}
        self._silent = {node: self._silent.get(node, now) for node in missed}
        found = {node for node, since in self._silent.items() if now - since >= self._plan.lost_after_s} - self.lost
        self.lost |= found
        return found

    def outdated(self) -> str:
        """Why to replan: a site has joined or is not as fast as planned; "": no reason."""
        here = {site.name: site.speed for site in self.here()}
        return outdated(self._speeds, {**self._speeds, **here})

    def planned_with(self, sites: Iterable[Site]) -> None:
        """Record that the experts were placed with these sites and speeds."""
        labels = self.labels()
        lost = {labels[node] for node in self.lost}
        waited_for = {name: speed for name, speed in self._speeds.items() if name not in lost}
        self._speeds = {**waited_for, **{site.name: site.speed for site in sites}}

    def seconds(self, job: Expert, name: str) -> float:
        """Predicted seconds of a job at a site."""
        site = self._site(name, self._speeds.get(name) or self._base(name))
        return as_job([job]).seconds(site)

    def _base(self, name: str) -> float:
        """A site's planned FLOP/s; for a site that joined later, those of the slowest planned site."""
        planned = self._planned.get(name)
        return planned.speed if planned else min(site.speed for site in self._planned.values())

    def _site(self, name: str, speed: float) -> Site:
        planned = self._planned.get(name)
        return Site(name, speed, planned.memory, planned.line) if planned else Site(name, speed)


@dataclass(frozen=True)
class OpenWork:
    """What is left to do of a plan.

    Attributes:
        plan: the plan, with the state of its jobs.
        kept: step after which the coordinator's checkpoint of a job was made, by number; 0: there is none.
        names: names of the sites, by node id.
    """

    plan: AcceptedPlan
    kept: Mapping[int, int]
    names: Mapping[str, str]

    def chains(self) -> list[Chain]:
        """The chains that are not done, in the order in which sites train them: the shortest first."""
        return [chain for chain in self.plan.queue() if not all(job.result for job in self._jobs(chain))]

    def node(self, chain: Chain) -> str:
        """Node id of the site that has a chain; "": no site can train it."""
        return self.plan.jobs[chain[0]].node

    def is_begun(self, chain: Chain) -> bool:
        """Whether its site has trained a part of it itself, or trains it next."""
        own = next(each for each in self.chains() if self.node(each) == self.node(chain))
        return chain == own or any(self._done(job) > self._kept(job) or job.result for job in self._jobs(chain))

    def remainder(self, chain: Chain, adrift: bool, sites: Sequence[Site]) -> Remainder:
        """What is left of a chain. Another site would continue from the checkpoints that the coordinator keeps.

        Args:
            adrift: no site has the chain, or its site is lost or cannot train it.
        """
        job, kept = self._allowed(chain, sites), sum(map(self._kept, self._jobs(chain)))
        if adrift:
            return Remainder(job, max(job.flops - kept, 1.0), kept=kept > 0)
        done = sum(map(self._done, self._jobs(chain)))
        name, begun = self.names[self.node(chain)], self.is_begun(chain)
        return Remainder(job, max(job.flops - done, 1.0), max(done - kept, 0.0), name, begun, kept > 0)

    def _jobs(self, chain: Chain) -> list[Expert]:
        return [self.plan.jobs[number] for number in chain]

    def _allowed(self, chain: Chain, sites: Sequence[Site]) -> Job:
        """A chain as a job for the sites that may train it and have not declined it."""
        job = as_job(self._jobs(chain))
        barred = {self.names[node] for each in self._jobs(chain) for node in each.declined}
        if not barred:
            return job
        left = (job.sites or frozenset(site.name for site in sites)) - barred
        return replace(job, sites=left or frozenset({""}))  # an empty set would mean all

    def _done(self, job: Expert) -> float:
        """FLOPs of a job that its site has done."""
        return job.job.flops * job.steps_done(self.kept.get(job.number, 0)) / job.job.steps

    def _kept(self, job: Expert) -> float:
        """FLOPs of a job that its checkpoint holds."""
        return job.job.flops * min(1.0, self.kept.get(job.number, 0) / job.job.steps)


def as_job(own: Sequence[Expert]) -> Job:
    """The experts of a chain as one job for the planner."""
    largest = max(own, key=lambda each: each.memory)
    size = Size(largest.job.size, largest.parameters, 0.0, largest.memory, 0.0)
    costs = ((each.job.flops, each.judging, each.moved, each.setup) for each in own)
    flops, judging, moved, setup = (sum(them) for them in zip(*costs))
    name, numbers, sites = own[-1].job.domain.name, tuple(each.number for each in own), frozenset(own[0].sites)
    return Job(name, numbers, size, flops, judging, moved, setup, sites)


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
    """Why to replan: a site has joined, is lost or has another speed (FLOP/s) than planned; "": no reason."""
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
        np.array([[_seconds(rest, site) for site in sites] for rest in remainders]),
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


def _seconds(rest: Remainder, site: Site) -> float:
    """Seconds until an expert is done and sent; no setup for one in training at its site. inf: it cannot be there."""
    if not rest.job.fits(site):
        return math.inf
    here, size = rest.site == site.name, rest.job.size
    if here and rest.begun:
        return (rest.left + rest.job.judging) / site.speed + size.stored / site.line
    work = rest.left + (0.0 if here else rest.replay) + rest.job.judging
    moved = size.stored if here else rest.job.moved
    fetched = CHECKPOINT * size.parameters - (0.0 if here else size.stored) if rest.kept else 0.0
    return work / site.speed + rest.job.setup + (moved + fetched) / site.line
