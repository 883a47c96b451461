"""Recipes: the size and the steps of each domain's expert, and the jobs for sites that follow from a recipe.

A recipe follows a mode of HDEE (arXiv 2502.19385) or Stage A. In the names of the paper's three modes, M means model
sizes, I iterations (steps), Ho homogeneous and He heterogeneous. All recipes cost the same number of FLOPs, head and
attention included; a recipe that would not is scaled, for instance S300/M400/L500 by 0.985.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.allocation import Allowed, Fits, Sizes, allocated
from pier_coordinator.experts.difficulty import FLOPS_PER_PARAMETER, Classes, Difficulty, classes
from pier_coordinator.experts.scheduling import Problem
from pier_coordinator.experts.task import MIDDLE, Domain, Site, Size, Task
from pier_node.experts.mixture import Array

Mode = Literal["auto", "MHo-IHo", "MHo-IHe", "MHe-IHo"]
MODES: tuple[Mode, ...] = get_args(Mode)
Steps = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Recipe:
    """The size and steps of each domain's expert.

    Attributes:
        sizes: index of its size, [domains].
        steps: its number of steps, [domains].
        scale: factor by which the mode's steps were multiplied to meet the budget.
        rows: the chain of each domain, in the order of `chains`, [domains]; without chains, each domain has its own.
    """

    sizes: Sizes
    steps: Steps
    rows: Classes
    scale: float = 1.0

    @property
    def chains(self) -> list[tuple[int, ...]]:
        """For each expert, the domains that it is trained on, in order."""
        return [tuple(np.flatnonzero(self.rows == row).tolist()) for row in np.unique(self.rows)]

    def flops(self, task: Task) -> Array:
        """FLOPs of each domain's training, [domains]."""
        return np.asarray(task.choice.flops[self.sizes] * self.steps * task.step_tokens)


def recipe(mode: Mode, task: Task, difficulty: Difficulty, budget: float, fits: Fits) -> Recipe:
    """The recipe of a mode for `budget` FLOPs; `auto` uses only sizes in `fits`, [domains, sizes].

    Raises:
        BudgetError: the budget is too small.
    """
    if mode == "auto":
        return _allocated(task, difficulty, budget, fits)
    of_size, of_steps = (
        classes(gain.value, difficulty.loss, task.given) for gain in (difficulty.size, difficulty.step)
    )
    count = len(task.domains)
    sizes = of_size if mode == "MHe-IHo" else np.full(count, MIDDLE)
    menu = of_steps if mode == "MHo-IHe" else np.full(count, MIDDLE)
    rows = (of_steps if mode == "MHo-IHe" else of_size) if task.chain else np.arange(count)
    steps = np.array(task.steps)[_last_only(menu, rows)]
    return scaled(Recipe(sizes, steps, rows), task, budget)


def scaled(made: Recipe, task: Task, budget: float) -> Recipe:
    """Scale a recipe to another budget: all steps times one factor, rounded so that the budget is used up."""
    scale = budget / float(made.flops(task).sum())
    if abs(scale - 1) < 1e-9:
        return made
    costs = task.choice.flops[made.sizes] * task.step_tokens
    steps = whole(np.asarray(made.steps * scale, dtype=np.float64), costs, budget)
    return replace(made, steps=steps, scale=made.scale * scale)


def whole(steps: Array, costs: Array, budget: float) -> Steps:
    """Integer steps, at least 1: rounded down, then up again while the budget allows, the most reduced ones first."""
    # A product that should be an integer may come out slightly below it.
    found = np.maximum(np.floor(steps + 1e-6), 1).astype(np.intp)
    for domain in np.argsort(found - steps, kind="stable"):
        if found[domain] < steps[domain] and (found * costs).sum() + costs[domain] <= budget * (1 + 1e-9):
            found[domain] += 1
    return found


def _allocated(task: Task, difficulty: Difficulty, budget: float, fits: Fits) -> Recipe:
    choice = task.choice
    least = np.minimum(choice.tokens[0], task.most)
    # What counts is the parameters that compute: an embedding costs nothing, and a head costs and gains like a layer.
    allowed = Allowed(choice.flops / FLOPS_PER_PARAMETER, choice.flops, least, task.most, budget, fits)
    found = allocated(difficulty.curves, task.weights, allowed)
    costs = choice.flops[found.sizes] * task.step_tokens
    steps = whole(found.tokens / task.step_tokens, costs, budget)
    return Recipe(found.sizes, steps, np.arange(len(steps)))


def _last_only(menu: Classes, rows: Classes) -> Classes:
    """In a chain, each domain starts from the previous one at the usual steps, so only the last domain may differ."""
    last = {int(row): domain for domain, row in enumerate(rows)}
    return np.array([menu[domain] if last[int(row)] == domain else MIDDLE for domain, row in enumerate(rows)])


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
