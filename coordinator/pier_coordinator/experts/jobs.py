"""Experts as jobs for sites: how long each takes where, and where it may not be (spec/hdee.md section 2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pier_coordinator.experts.allocation import Fits
from pier_coordinator.experts.problem import Problem
from pier_coordinator.experts.recipe import Recipe
from pier_coordinator.experts.task import Domain, Site, Size, Task

JUDGING = 2 / 3
"""A forward pass costs a third of a step; the expert and its parent take one each over what they are judged on."""


@dataclass(frozen=True)
class Job:
    """An expert that one site trains.

    Attributes:
        domains: indices of those that it is trained on, one after the other.
        flops: of its training; judging: those of judging it, which are in no budget.
        moved: bytes that a site fetches (its seed, its text) and sends (the expert).
        setup: seconds that it takes besides.
        sites: names of those that may see its text; none: all.
    """

    name: str
    domains: tuple[int, ...]
    size: Size
    flops: float
    judging: float
    moved: float
    setup: float
    sites: frozenset[str]

    def fits(self, site: Site) -> bool:
        """Whether the site has the memory, and may see the text."""
        return _fits(self.size, self.sites, site)

    def seconds(self, site: Site) -> float:
        """How long the site takes for it."""
        return self.flops / site.speed + self.overhead(site)

    def overhead(self, site: Site) -> float:
        """Seconds of it in which nothing is trained there."""
        return self.setup + self.judging / site.speed + self.moved / site.line


def jobs(task: Task, recipe: Recipe) -> list[Job]:
    """One for each domain, or for each chain."""
    flops = recipe.flops(task)
    return [
        _job(task, task.sizes[recipe.sizes[chain[-1]]], chain, float(flops[[*chain]].sum())) for chain in recipe.chains
    ]


def fitting(task: Task, sites: Sequence[Site]) -> Fits:
    """Whether some site can train an expert of that size on that domain, [domains, sizes]."""
    return np.array(
        [[any(_fits(size, domain.sites, site) for site in sites) for size in task.sizes] for domain in task.domains]
    )


def problem(jobs: Sequence[Job], sites: Sequence[Site]) -> Problem:
    """Of placing jobs at sites."""
    times = [[job.seconds(site) if job.fits(site) else np.inf for site in sites] for job in jobs]
    return Problem(
        np.array(times),
        np.array([job.flops for job in jobs]),
        np.array([site.speed for site in sites]),
        np.array([site.window for site in sites]),
    )


def judging_flops(size: Size, domains: Sequence[Domain]) -> float:
    """Of judging an expert of a size on each of its domains."""
    return JUDGING * size.flops * sum(domain.judged for domain in domains)


def _fits(size: Size, allowed: frozenset[str], site: Site) -> bool:
    return size.memory <= site.memory and (not allowed or site.name in allowed)


def _job(task: Task, size: Size, chain: tuple[int, ...], flops: float) -> Job:
    domains = [task.domains[domain] for domain in chain]
    limits = [domain.sites for domain in domains if domain.sites]
    allowed = frozenset.intersection(*limits) if limits else frozenset()
    if limits and not allowed:
        allowed = frozenset({""})  # no site may see them all
    moved = 2 * size.stored + sum(domain.sent for domain in domains)
    name, setup = " → ".join(domain.name for domain in domains), task.setup * len(chain)
    return Job(name, chain, size, flops, judging_flops(size, domains), moved, setup, allowed)
