"""The sites that train a plan's experts: who is there, who is lost, how fast each is, and if that asks for a new plan.

A site that joins the run after the plan was accepted becomes one of them; one that was in the run by then, and was not
planned with, was left out on purpose.

How fast sites train their experts, by what they say of them: the mean of the last stretch of some length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pier_coordinator.experts.accepted import AcceptedJob, AcceptedPlan
from pier_coordinator.experts.replan import outdated
from pier_coordinator.experts.task import Site

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator


STEPS, SECONDS = 20, 10.0
"""A stretch has so many steps at least, and takes so long: a measurement of fewer is mostly chance."""


@dataclass(frozen=True)
class Mark:
    """Where a stretch began: an expert, its steps, and the seconds of that start of the site in training it."""

    job: int
    step: int
    seconds: float


class Paces:
    """Of all sites, by node."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._speeds: dict[str, float] = {}

    def heard(self, node: str, job: int, step: int, seconds: float, flops: float) -> None:
        """A site says how far it is with an expert; `flops` are those of a step.

        A site that was started again, or paused, begins its seconds anew: what it did meanwhile is not known.
        """
        mark = self._marks.get(node)
        if mark is None or mark.job != job or step < mark.step or seconds < mark.seconds:
            self._marks[node] = Mark(job, step, seconds)
        elif step - mark.step >= STEPS and seconds - mark.seconds >= SECONDS:
            self._speeds[node] = flops * (step - mark.step) / (seconds - mark.seconds)
            self._marks[node] = Mark(job, step, seconds)

    def speed(self, node: str) -> float | None:
        """FLOP/s; None: not measured yet."""
        return self._speeds.get(node)


class ExpertSites:
    """Those of one plan.

    Args:
        accepted: when the plan was, seconds since the epoch.

    Attributes:
        lost: nodes that were silent for too long, and are still.
        paces: what sites say of their speed.
    """

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float) -> None:
        self._of, self._plan, self._accepted = coordinator, plan, accepted
        self._planned = {site.name: site for site in plan.sites}
        self._speeds = {site.name: site.speed for site in plan.sites}
        self._silent: dict[str, float] = {}
        self.lost: set[str] = set()
        self.paces = Paces()

    def names(self) -> dict[str, str]:
        """Node ids by name."""
        return {
            site.name: site.node
            for site in self._of.sites.values()
            if site.revoked_at is None and (site.name in self._planned or site.enrolled_at > self._accepted)
        }

    def here(self) -> list[Site]:
        """Those that answer, as fast as they say; who has not said it yet is as much off the plan as the others."""
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
        """Which of these sites are lost since the last look; `now` by any clock that does not go back."""
        self.lost = {node for node in self.lost if not self._of.registry.is_here(node)}
        missed = {node for node in (*nodes, *self.lost) if not self._of.registry.is_here(node)}
        self._silent = {node: self._silent.get(node, now) for node in missed}
        found = {node for node, since in self._silent.items() if now - since >= self._plan.lost_after_s} - self.lost
        self.lost |= found
        return found

    def outdated(self) -> str:
        """Why the places of the experts should be planned anew: who has come, or is not as fast as planned; "": not."""
        here = {site.name: site.speed for site in self.here()}
        return outdated(self._speeds, {**self._speeds, **here})

    def planned_with(self, sites: Iterable[Site]) -> None:
        """Experts have their places by what is known of these sites now."""
        lost = {self._of.sites[node].name for node in self.lost}
        waited_for = {name: speed for name, speed in self._speeds.items() if name not in lost}
        self._speeds = {**waited_for, **{site.name: site.speed for site in sites}}

    def seconds(self, job: AcceptedJob, name: str) -> float:
        """How long a job takes at a site."""
        site = self._site(name, self._speeds.get(name) or self._base(name))
        return self._plan.as_job([job.job.number]).seconds(site)

    def _base(self, name: str) -> float:
        """FLOP/s of the plan; of a site that has come since, those of the slowest."""
        planned = self._planned.get(name)
        return planned.speed if planned else min(site.speed for site in self._planned.values())

    def _site(self, name: str, speed: float) -> Site:
        planned = self._planned.get(name)
        return Site(name, speed, planned.memory, planned.line) if planned else Site(name, speed)
