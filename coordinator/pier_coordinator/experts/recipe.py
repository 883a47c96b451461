"""Who gets which size and how many steps: the paper's three modes, and Stage A (spec/hdee.md sections 2.2, 2.3, 3.2).

M is for model sizes, I for iterations (steps), Ho and He for homo- and heterogeneous. All recipes cost the same number
of FLOPs, head and attention included: one that would not is scaled, as S300/M400/L500 by 0.985.
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
    """What each domain's expert is.

    Attributes:
        sizes: index of its size, [domains].
        steps: [domains].
        scale: what the mode's steps were multiplied by so that the budget is met.
        abstained: domains did not differ enough, so they are treated alike, although the mode would not.
        rows: which chain a domain belongs to, in the order of `chains`; [domains], with all-from-seed each its own.
    """

    sizes: Sizes
    steps: Steps
    rows: Classes
    scale: float = 1.0
    abstained: bool = False

    @property
    def chains(self) -> list[tuple[int, ...]]:
        """The domains that one expert is trained on, in their order."""
        return [tuple(np.flatnonzero(self.rows == row).tolist()) for row in np.unique(self.rows)]

    def flops(self, task: Task) -> Array:
        """FLOPs of each domain's training, [domains]."""
        return np.asarray(task.choice.flops[self.sizes] * self.steps * task.step_tokens)


def recipe(mode: Mode, task: Task, difficulty: Difficulty, budget: float, fits: Fits) -> Recipe:
    """The recipe of a mode for `budget` FLOPs; `auto` takes sizes that fit, [domains, sizes]. Raises BudgetError."""
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
    """The same for another budget: all steps times one factor, and none is lost by rounding."""
    scale = budget / float(made.flops(task).sum())
    if abs(scale - 1) < 1e-9:
        return made
    costs = task.choice.flops[made.sizes] * task.step_tokens
    steps = whole(np.asarray(made.steps * scale, dtype=np.float64), costs, budget)
    return replace(made, steps=steps, scale=made.scale * scale)


def whole(steps: Array, costs: Array, budget: float) -> Steps:
    """Whole steps: rounded down, then up again where most was cut off, while the budget allows; at least 1 each."""
    # A product that should be whole may come out a hair below.
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
    """In a chain each expert begins where the one before it had the usual steps: only its last domain may differ."""
    last = {int(row): domain for domain, row in enumerate(rows)}
    return np.array([menu[domain] if last[int(row)] == domain else MIDDLE for domain, row in enumerate(rows)])
