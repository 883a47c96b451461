"""Bounds that an optimizer's state keeps whatever the gradients were, so that invented state can do no more than real.

With AdamW's m = (1 − β₁)·Σ β₁ᵏ·g and v = (1 − β₂)·Σ β₂ᵏ·g² (Kingma and Ba, arXiv 1412.6980, Algorithm 1), the
Cauchy-Schwarz inequality gives, for β₁² < β₂,

    m² ≤ v · (1 − β₁)² / ((1 − β₂)·(1 − β₁²/β₂))

in every element: so no step is longer than a real one can be. And a gradient that is clipped to the norm c has Σv ≤ c²
over all elements: so no second moment freezes what it belongs to.

Muon and SGD keep a momentum and no second moment. If gradients are clipped to c, the norm of Muon's momentum (1 − μ)·Σ
μᵏ·g is at most c, and that of SGD's Σ μᵏ·g at most c / (1 − μ). So SGD's step is no longer than a real one can be.
Muon's has the same length whatever the momentum is; here the bound ensures that real gradients soon outweigh it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pier_node.base.shared import Vector
from pier_node.config.run import InnerSection
from pier_node.outer.layout import Layout, is_hidden_matrix
from pier_node.outer.state import PIECE

ROUNDING = 1.01
"""What many roundings may add, as a factor."""
TINY = np.float32(1e-18)
"""First moments up to this are possible with a second moment of 0: the square of a small gradient underflows."""


@dataclass(frozen=True)
class MomentBounds:
    """What the optimizer's state of a run can be.

    Attributes:
        inner: the run's inner steps.
        matrices: start and stop of each hidden matrix, in order: those that Muon's momentum is for.
    """

    inner: InnerSection
    matrices: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, inner: InnerSection, layout: Layout) -> Self:
        """The bounds for a model, or for a stage of it."""
        hidden = (it for it in layout.entries if is_hidden_matrix(it.name, it.shape))
        return cls(inner, tuple((it.offset, it.offset + it.size) for it in hidden))

    def flaw(self, first: Vector, second: Vector) -> str:
        """What is wrong with a state, shape [parameters] each, finite and the second not negative; "" if nothing is."""
        if self.inner.optimizer == "adamw":
            return self._flaw_of_adamw(first, second, [(0, len(first))])
        if self.inner.optimizer == "sgd":
            return self._flaw_of_momentum(first, second, [(0, len(first))], 1 / (1 - self.inner.momentum))
        edges = [0, *(edge for matrix in self.matrices for edge in matrix), len(first)]
        flaw = self._flaw_of_momentum(first, second, self.matrices, 1.0)
        return flaw or self._flaw_of_adamw(first, second, [*zip(edges[::2], edges[1::2])])

    def _flaw_of_adamw(self, first: Vector, second: Vector, where: Iterable[tuple[int, int]]) -> str:
        beta1, beta2, clip = self.inner.beta1, self.inner.beta2, self.inner.clip_norm
        total, bounded = 0.0, beta1**2 < beta2
        most = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) if bounded else 0.0
        for part in _pieces(where):
            if bounded and (np.abs(first[part]) > np.float32(most * ROUNDING) * np.sqrt(second[part]) + TINY).any():
                return f"first moments of more than {most:.3g} times the root of the second"
            total += float(np.sum(second[part], dtype=np.float64))
        if clip and total > ROUNDING * clip**2:
            return f"second moments that add up to {total:.3g}: gradients are clipped to {clip:g}"
        return ""

    def _flaw_of_momentum(
        self, first: Vector, second: Vector, where: Iterable[tuple[int, int]], gradients: float
    ) -> str:
        name, clip, square = self.inner.optimizer, self.inner.clip_norm, 0.0
        for part in _pieces(where):
            if second[part].any():
                return f"second moments where {name} has none"
            square += float(np.sum(np.square(first[part], dtype=np.float64)))
        if clip and math.sqrt(square) > ROUNDING * clip * gradients:
            return f"a momentum of norm {math.sqrt(square):.3g}: gradients are clipped to {clip:g}"
        return ""


def _pieces(where: Iterable[tuple[int, int]]) -> Iterable[slice]:
    return (slice(at, min(at + PIECE, stop)) for start, stop in where for at in range(start, stop, PIECE))
