"""What a domain's loss would be with a model of N parameters after T tokens: a law, and its fit to short probes.

    L̂_j(N, T) = E_j + A_j / N^α + B_j / (T0 + T)^β

The exponents and T0 are shared by all domains: a few short points of each are not enough to tell them. With them
fixed, E, A and B are a linear least-squares fit without negative coefficients (spec/hdee.md sections 2.2 and 2.3; the
form is that of Hoffmann et al., arXiv 2203.15556).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.problem import Array

ALPHAS = (0.2, 0.34, 0.5, 0.8)
BETAS = (0.15, 0.2, 0.28, 0.4, 0.6, 0.9)
WARM = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Exponents that are tried, and T0 as multiples of the longest probe."""
SUBSETS = [[index for index in range(3) if mask >> index & 1] for mask in range(1, 8)]
"""Of E, A and B: the ones that are not 0."""


@dataclass(frozen=True)
class Curves:
    """The law of some domains; the arrays are [..., domains], losses in bits per byte.

    Attributes:
        floor, size, data: E, A and B.
        alpha, beta, warm: α, β and T0 (tokens).
    """

    floor: Array
    size: Array
    data: Array
    alpha: float
    beta: float
    warm: float

    def loss(self, parameters: Array | float, tokens: Array | float) -> Array:
        """L̂, [..., domains]; arguments for each domain, or one for all."""
        left = self.data / (self.warm + np.asarray(tokens)) ** self.beta
        return np.asarray(self.floor + self.size / np.asarray(parameters) ** self.alpha + left)

    def balanced(self, parameters: float, tokens: float) -> Curves:
        """The same with A in other units: for the mean domain N and T have the same marginal gain at these values.

        Models that stand in for the real ones tell how domains differ in what size gives them, but not how much that
        is. Then whoever chose N and T is taken to have chosen well.
        """
        of_size = (self.alpha * self.size / parameters**self.alpha).mean(axis=-1, keepdims=True)
        spread = self.beta * self.data * tokens / (self.warm + tokens) ** (self.beta + 1)
        of_data = spread.mean(axis=-1, keepdims=True)
        scale = np.divide(of_data, of_size, out=np.zeros_like(of_size), where=of_size > 0)
        return replace(self, size=self.size * scale)


def fitted(parameters: Array, tokens: Array, losses: Array) -> Curves:
    """The law that fits probes best.

    Args:
        parameters, tokens: of the probes, the same for all domains, [points].
        losses: bits per byte, [domains, points].
    """
    warm = [factor * float(tokens.max()) for factor in WARM]
    tried = [
        refitted((alpha, beta, t0), parameters, tokens, losses) for alpha, beta, t0 in product(ALPHAS, BETAS, warm)
    ]
    return min(tried, key=lambda curves: _error(curves, parameters, tokens, losses))


def refitted(law: tuple[float, float, float], parameters: Array, tokens: Array, losses: Array) -> Curves:
    """E, A and B for given (α, β, T0); `losses` may have more axes in front, as those of a bootstrap."""
    alpha, beta, warm = law
    columns = np.stack([np.ones_like(tokens), parameters**-alpha, (warm + tokens) ** -beta], axis=1)  # [points, 3]
    scale = columns.mean(axis=0)
    terms = _non_negative(columns / scale, losses) / scale
    return Curves(terms[..., 0], terms[..., 1], terms[..., 2], alpha, beta, warm)


def _non_negative(columns: Array, losses: Array) -> Array:
    """Least squares without negative coefficients, [..., 3]: the best of those with some of them 0."""
    best = np.zeros((*losses.shape[:-1], 3))
    error = np.full(losses.shape[:-1], np.inf)
    for subset in SUBSETS:
        terms = np.zeros_like(best)
        terms[..., subset] = losses @ np.linalg.pinv(columns[:, subset]).T
        missed = ((terms @ columns.T - losses) ** 2).sum(axis=-1)
        better: npt.NDArray[np.bool_] = (terms >= 0).all(axis=-1) & (missed < error)
        best, error = np.where(better[..., None], terms, best), np.where(better, missed, error)
    return best


def _error(curves: Curves, parameters: Array, tokens: Array, losses: Array) -> float:
    found = np.stack([curves.loss(size, count) for size, count in zip(parameters, tokens)], axis=-1)
    return float(((found - losses) ** 2).sum())
