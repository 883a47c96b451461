"""The loss law of a domain, for a model of N parameters after T tokens, and its fit to short probes.

    L̂_j(N, T) = E_j + A_j / N^α + B_j / (T0 + T)^β

The form is that of Hoffmann et al., arXiv 2203.15556. All domains share the exponents and T0, because a few short
probes of each domain do not determine them. With these fixed, E, A and B follow from a linear least-squares fit with
non-negative coefficients.
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
"""The exponents that are tried, and T0 as multiples of the longest probe's tokens."""
SUBSETS = [[index for index in range(3) if mask >> index & 1] for mask in range(1, 8)]
"""Which of E, A and B are not 0: all non-empty subsets."""


@dataclass(frozen=True)
class Curves:
    """The laws of some domains; arrays are [..., domains], losses are in bits per byte.

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
        """L̂, [..., domains]; each argument has a value per domain, or one for all."""
        left = self.data / (self.warm + np.asarray(tokens)) ** self.beta
        return np.asarray(self.floor + self.size / np.asarray(parameters) ** self.alpha + left)

    def balanced(self, parameters: float, tokens: float) -> Curves:
        """Return a copy with A rescaled: for the mean domain, N and T have the same marginal gain at these values.

        Stand-in models show how the gain from size differs between domains, but not how large it is. N and T are
        therefore assumed to have been chosen well.
        """
        of_size = (self.alpha * self.size / parameters**self.alpha).mean(axis=-1, keepdims=True)
        spread = self.beta * self.data * tokens / (self.warm + tokens) ** (self.beta + 1)
        of_data = spread.mean(axis=-1, keepdims=True)
        scale = np.divide(of_data, of_size, out=np.zeros_like(of_size), where=of_size > 0)
        return replace(self, size=self.size * scale)


def fitted(parameters: Array, tokens: Array, losses: Array) -> Curves:
    """The laws that fit some probes best.

    Args:
        parameters, tokens: parameters and tokens of each probe, the same for all domains, [points].
        losses: bits per byte, [domains, points].
    """
    warm = [factor * float(tokens.max()) for factor in WARM]
    tried = [
        refitted((alpha, beta, t0), parameters, tokens, losses) for alpha, beta, t0 in product(ALPHAS, BETAS, warm)
    ]
    return min(tried, key=lambda curves: _error(curves, parameters, tokens, losses))


def refitted(law: tuple[float, float, float], parameters: Array, tokens: Array, losses: Array) -> Curves:
    """Fit E, A and B for given (α, β, T0); `losses` may have more leading axes, as in a bootstrap."""
    alpha, beta, warm = law
    columns = np.stack([np.ones_like(tokens), parameters**-alpha, (warm + tokens) ** -beta], axis=1)  # [points, 3]
    scale = columns.mean(axis=0)
    terms = _non_negative(columns / scale, losses) / scale
    return Curves(terms[..., 0], terms[..., 1], terms[..., 2], alpha, beta, warm)


def _non_negative(columns: Array, losses: Array) -> Array:
    """Non-negative least squares, [..., 3]: the best fit over all subsets of coefficients that are not 0."""
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
