"""Replanning while experts are being trained: when to replan, what is left, and where each expert continues.

An expert that moves must be set up again, fetch its checkpoint and repeat what came after it. It therefore moves only
if all experts are done sooner in spite of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pier_coordinator.experts.problem import Array, Problem
from pier_coordinator.experts.recipe import Job
from pier_coordinator.experts.scheduling import NOTHING, Limits, NoPlaceError, Schedule, cost, schedule
from pier_coordinator.experts.task import Site, Size
from pier_coordinator.store.experts import AcceptedPlan, Expert

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


Chain = list[int]
"""Numbers of jobs that one site trains one after the other; most chains have one job."""


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
            chain: numbers of its jobs.
            adrift: no site has the chain, or its site is lost or cannot train it.
            sites: the sites to plan with.
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
