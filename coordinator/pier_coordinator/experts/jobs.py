"""Experts as jobs for sites: how long each job takes at each site, and where it may not go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pier_coordinator.experts.allocation import Fits
from pier_coordinator.experts.problem import Problem
from pier_coordinator.experts.recipe import Recipe
from pier_coordinator.experts.task import Domain, Site, Size, Task

JUDGING = 2 / 3
"""Cost of judging a token, relative to training: the expert and its parent each take a forward pass, 1/3 of a step."""


@dataclass(frozen=True)
class Job:
    """An expert that one site trains.

    Attributes:
        domains: indices of the domains that it is trained on, one after the other.
        flops: FLOPs of its training.
        judging: FLOPs of judging it, which count towards no budget.
        moved: bytes that a site fetches (its seed model, its text) and sends (the expert).
        setup: seconds that it takes in addition.
        sites: names of the sites that may see its text; empty: all sites.
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
        """Whether the site has enough memory and may see the text."""
        return _fits(self.size, self.sites, site)

    def seconds(self, site: Site) -> float:
        """Seconds that the site takes for it."""
        return self.flops / site.speed + self.overhead(site)

    def overhead(self, site: Site) -> float:
        """Seconds of it in which the site does not train."""
        return self.setup + self.judging / site.speed + self.moved / site.line


def jobs(task: Task, recipe: Recipe) -> list[Job]:
    """The jobs of a recipe: one per domain, or one per chain."""
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
    """The problem of placing jobs at sites."""
    times = [[job.seconds(site) if job.fits(site) else np.inf for site in sites] for job in jobs]
    return Problem(
        np.array(times),
        np.array([job.flops for job in jobs]),
        np.array([site.speed for site in sites]),
        np.array([site.window for site in sites]),
    )


def judging_flops(size: Size, domains: Sequence[Domain]) -> float:
    """FLOPs of judging an expert of a size on each of its domains."""
    return JUDGING * size.flops * sum(domain.judged for domain in domains)


def _fits(size: Size, allowed: frozenset[str], site: Site) -> bool:
    return size.memory <= site.memory and (not allowed or site.name in allowed)


def _job(task: Task, size: Size, chain: tuple[int, ...], flops: float) -> Job:
    domains = [task.domains[domain] for domain in chain]
    limits = [domain.sites for domain in domains if domain.sites]
    allowed = frozenset.intersection(*limits) if limits else frozenset()
    if limits and not allowed:
        allowed = frozenset({""})  # no site may see all of them
    moved = 2 * size.stored + sum(domain.sent for domain in domains)
    name, setup = " → ".join(domain.name for domain in domains), task.setup * len(chain)
    return Job(name, chain, size, flops, judging_flops(size, domains), moved, setup, allowed)
