"""Recipes: the size and the steps of each domain's expert, by a mode of HDEE (arXiv 2502.19385) or by Stage A.

In the names of the paper's three modes, M means model sizes, I iterations (steps), Ho homogeneous and He heterogeneous.
All recipes cost the same number of FLOPs, head and attention included; a recipe that would not is scaled, for instance
S300/M400/L500 by 0.985.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.allocation import Allowed, Fits, Sizes, allocated
from pier_coordinator.experts.difficulty import Classes, Difficulty, classes
from pier_coordinator.experts.problem import Array
from pier_coordinator.experts.task import MIDDLE, Task

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
        abstained: domains did not differ enough and are treated alike, although the mode would not.
        rows: the chain of each domain, in the order of `chains`, [domains]; without chains, each domain has its own.
    """

    sizes: Sizes
    steps: Steps
    rows: Classes
    scale: float = 1.0
    abstained: bool = False

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
    if mode == "auto" and difficulty.tells:
        return _allocated(task, difficulty, budget, fits)
    of_size, of_steps = (classes(gain.value, difficulty.loss) for gain in (difficulty.size, difficulty.step))
    count = len(task.domains)
    sizes = of_size if mode == "MHe-IHo" else np.full(count, MIDDLE)
    menu = of_steps if mode == "MHo-IHe" else np.full(count, MIDDLE)
    rows = (of_steps if mode == "MHo-IHe" else of_size) if task.chain else np.arange(count)
    steps = np.array(task.steps)[_last_only(menu, rows)]
    return scaled(Recipe(sizes, steps, rows, abstained=mode == "auto"), task, budget)


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
    allowed = Allowed(choice.parameters, choice.flops, least, task.most, budget, fits)
    found = allocated(difficulty.curves, task.weights, allowed)
    costs = choice.flops[found.sizes] * task.step_tokens
    steps = whole(found.tokens / task.step_tokens, costs, budget)
    return Recipe(found.sizes, steps, np.arange(len(steps)))


def _last_only(menu: Classes, rows: Classes) -> Classes:
    """In a chain, each domain starts from the previous one at the usual steps, so only the last domain may differ."""
    last = {int(row): domain for domain, row in enumerate(rows)}
    return np.array([menu[domain] if last[int(row)] == domain else MIDDLE for domain, row in enumerate(rows)])
