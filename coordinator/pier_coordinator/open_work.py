"""What is left of a plan's experts, as planning anew sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pier_coordinator.experts.accepted import AcceptedPlan
from pier_coordinator.experts.jobs import Job
from pier_coordinator.experts.replan import Remainder
from pier_coordinator.experts.task import Site
from pier_coordinator.store.experts import JobRow

Chain = list[int]
"""Numbers of jobs that follow one another at one site; most chains have one."""


@dataclass(frozen=True)
class OpenWork:
    """A moment of a plan.

    Attributes:
        jobs: by number.
        steps: done in jobs under way, by number; kept: those after which the coordinator's checkpoint was made.
        names: of sites, by node.
    """

    plan: AcceptedPlan
    jobs: Mapping[int, JobRow]
    steps: Mapping[int, int]
    kept: Mapping[int, int]
    names: Mapping[str, str]

    def chains(self) -> list[Chain]:
        """Those that are not done, as sites take them: the shortest first."""
        return [chain for chain in self.plan.queue() if not all(self.jobs[each].result for each in chain)]

    def node(self, chain: Chain) -> str:
        """Of the site that has it; "": nobody can train it."""
        return self.jobs[chain[0]].node

    def is_begun(self, chain: Chain) -> bool:
        """Whether its site has trained some of it itself, or does so next."""
        own = next(each for each in self.chains() if self.node(each) == self.node(chain))
        trained = (self.steps.get(each, 0) > self.kept.get(each, 0) or self.jobs[each].result for each in chain)
        return chain == own or any(trained)

    def remainder(self, chain: Chain, adrift: bool, sites: Sequence[Site]) -> Remainder:
        """What is left of a chain. Elsewhere it goes on from the checkpoints that the coordinator keeps.

        Args:
            adrift: no site has it, or one that is lost or cannot train it.
        """
        job, kept = self._allowed(chain, sites), sum(self._done(each, self.kept) for each in chain)
        if adrift:
            return Remainder(job, max(job.flops - kept, 1.0), kept=kept > 0)
        done = sum(self._flops(each) if self.jobs[each].result else self._done(each, self.steps) for each in chain)
        name, begun = self.names[self.node(chain)], self.is_begun(chain)
        return Remainder(job, max(job.flops - done, 1.0), max(done - kept, 0.0), name, begun, kept > 0)

    def _allowed(self, chain: Chain, sites: Sequence[Site]) -> Job:
        """A chain as a job for the sites that may train it and have not said that they cannot."""
        job = self.plan.as_job(chain)
        barred = self._barred(chain)
        if not barred:
            return job
        left = (job.sites or frozenset(site.name for site in sites)) - barred
        return replace(job, sites=left or frozenset({""}))  # an empty one would mean all

    def _barred(self, chain: Chain) -> set[str]:
        return {self.names[node] for each in chain for node in self.jobs[each].declined}

    def _flops(self, number: int) -> float:
        return self.plan.jobs[number].job.flops

    def _done(self, number: int, steps: Mapping[int, int]) -> float:
        """FLOPs of a job after so many steps."""
        return self._flops(number) * min(1.0, steps.get(number, 0) / self.plan.jobs[number].job.steps)
