"""The sites that train a plan's experts: which are live or lost, how fast each is, and whether to replan.

A site that joins the run after the plan was accepted becomes one of them. A site that was in the run before and is not
in the plan was left out on purpose. A site's speed is measured from its progress reports, as the mean over its last
sufficiently long stretch of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pier_coordinator.experts.replan import as_job, outdated
from pier_coordinator.experts.task import Site
from pier_coordinator.store.experts import AcceptedPlan, Expert

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator


STEPS, SECONDS = 20, 10.0
"""Minimum steps and seconds of a stretch: a shorter measurement is mostly noise."""


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
        coordinator: the coordinator of the run.
        plan: the plan.
        accepted: when the plan was accepted, seconds since the epoch.

    Attributes:
        lost: node ids of the sites that have been silent for too long and still are.
        paces: the measured speeds of the sites.
    """

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float) -> None:
        self._of, self._plan, self._accepted = coordinator, plan, accepted
        self._planned = {site.name: site for site in plan.sites}
        self._speeds = {site.name: site.speed for site in plan.sites}
        self._silent: dict[str, float] = {}
        self.lost: set[str] = set()
        self.paces = Paces()

    def names(self) -> dict[str, str]:
        """Node ids of these sites, by name."""
        return {
            site.name: site.node
            for site in self._of.sites.values()
            if site.revoked_at is None and (site.name in self._planned or site.enrolled_at > self._accepted)
        }

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
        lost = {self._of.sites[node].name for node in self.lost}
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
