"""Stage A: chooses the size and the number of tokens of each domain's expert within a budget of FLOPs.

    min Σ_j v_j L̂_j(N_sj, T_j)   s.t.   Σ_j F_sj T_j <= C,   T_min <= T_j <= e_max D_j

For given sizes, the marginal gain of a FLOP, v_j β B_j (T0 + T_j)^(-β-1) / F_j, is the same for every T_j that is at no
bound (water-filling). All combinations of sizes are tried; if there are too many, sizes are changed one or two at a
time. This stage goes beyond HDEE (arXiv 2502.19385).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.difficulty import Curves
from pier_node.experts.mixture import Array

ALL = 100_000
"""Up to this number, all combinations of sizes are tried."""
HALVINGS = 60
TINY = 1e-200

Sizes = npt.NDArray[np.intp]
Fits = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Allowed:
    """What Stage A may choose from.

    Attributes:
        parameters: number of parameters of a model of each size, [sizes].
        flops: FLOPs per token of each size, [sizes].
        least, most: bounds on the tokens of a domain's expert, [domains].
        budget: FLOPs of all experts together.
        fits: whether some site can train an expert of that size on that domain, [domains, sizes].
    """

    parameters: Array
    flops: Array
    least: Array
    most: Array
    budget: float
    fits: Fits


@dataclass(frozen=True)
class Allocation:
    """The size (index) and the tokens of each domain's expert, [domains]; `loss` is the weighted sum of the losses."""

    sizes: Sizes
    tokens: Array
    loss: float


class BudgetError(Exception):
    """The budget is too small for the minimum number of tokens; `needed` FLOPs would be enough."""

    def __init__(self, needed: float) -> None:
        super().__init__(f"{needed:.3g} FLOPs are needed")
        self.needed = needed


def allocated(curves: Curves, weights: Array, allowed: Allowed) -> Allocation:
    """The best allocation that is found. Raises BudgetError."""
    cheapest = float((allowed.flops.min() * allowed.least).sum())
    if cheapest > allowed.budget:
        raise BudgetError(cheapest)
    kinds, domains = len(allowed.flops), len(weights)
    if kinds**domains <= ALL:
        return _best(curves, weights, allowed, np.array([*product(range(kinds), repeat=domains)], dtype=np.intp))
    equal = np.tile(np.arange(kinds), (domains, 1)).T
    found = _best(curves, weights, allowed, equal)
    while True:
        next_one = _best(curves, weights, allowed, np.array([*_changes(found.sizes, kinds)]))
        if next_one.loss >= found.loss * (1 - 1e-12):
            return found
        found = next_one


def filled(gain: Array, flops: Array, curves: Curves, least: Array, most: Array, budget: Array | float) -> Array:
    """Tokens for experts of given sizes, such that the last FLOP gains the same for each.

    Args:
        gain: v_j B_j; all arrays are [..., domains], `budget` (FLOPs) is [...].

    Returns:
        [..., domains]; they cost the budget, or less if all are at `most`.
    """
    # T0 + T_j is the domain's share times one common level; the level is found by bisection.
    share = (np.maximum(gain, TINY) / flops) ** (1 / (1 + curves.beta))
    low, high = (np.maximum(curves.warm + least, 1.0) / share).min(axis=-1), ((curves.warm + most) / share).max(axis=-1)
    for _ in range(HALVINGS):
        middle = np.sqrt(low) * np.sqrt(high)
        tokens = np.clip(share * middle[..., None] - curves.warm, least, most)
        above = (tokens * flops).sum(axis=-1) > budget
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.asarray(np.clip(share * low[..., None] - curves.warm, least, most))


def _best(curves: Curves, weights: Array, allowed: Allowed, tried: Sizes) -> Allocation:
    """The best allocation for some combinations of sizes, [combinations, domains]."""
    flops = allowed.flops[tried]
    most = np.maximum(allowed.least, np.minimum(allowed.most, allowed.budget / flops))
    tokens = filled(weights * curves.data, flops, curves, allowed.least, most, allowed.budget)
    losses = (weights * curves.loss(allowed.parameters[tried], tokens)).sum(axis=-1)
    fit = allowed.fits[np.arange(tried.shape[1]), tried].all(axis=-1)
    losses[~fit | ((flops * tokens).sum(axis=-1) > allowed.budget * (1 + 1e-9))] = np.inf
    best = int(losses.argmin())
    return Allocation(tried[best], tokens[best], float(losses[best]))


def _changes(sizes: Sizes, kinds: int) -> Iterator[Sizes]:
    """All changes of the size of one domain, and all swaps of the sizes of two domains."""
    for domain, kind in product(range(len(sizes)), range(kinds)):
        changed = sizes.copy()
        changed[domain] = kind
        yield changed
    for one, other in combinations(range(len(sizes)), 2):
        if sizes[one] != sizes[other]:
            changed = sizes.copy()
            changed[[one, other]] = sizes[[other, one]]
            yield changed
