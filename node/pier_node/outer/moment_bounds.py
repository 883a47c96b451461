"""Bounds that AdamW's moments keep whatever the gradients were, so that invented ones can do no more than real ones.

With m = (1 − β₁)·Σ β₁ᵏ·g and v = (1 − β₂)·Σ β₂ᵏ·g² (Kingma and Ba, arXiv 1412.6980, Algorithm 1), the Cauchy-Schwarz
inequality gives, for β₁² < β₂,

    m² ≤ v · (1 − β₁)² / ((1 − β₂)·(1 − β₁²/β₂))

in every element: so no step is longer than a real one can be. And a gradient that is clipped to the norm c has Σv ≤ c²
over all elements: so no second moment freezes what it belongs to.
"""

from __future__ import annotations

import math

import numpy as np

from pier_node.base.shared import Vector
from pier_node.config.run import InnerSection
from pier_node.outer.state import PIECE

ROUNDING = 1.01
"""What many roundings may add, as a factor."""
TINY = np.float32(1e-18)
"""First moments up to this are possible with a second moment of 0: the square of a small gradient underflows."""


def implausible(first: Vector, second: Vector, inner: InnerSection) -> str:
    """What is wrong with moments, shape [parameters] each, finite and the second not negative; "" if nothing is."""
    if inner.beta1**2 < inner.beta2:
        most = (1 - inner.beta1) / math.sqrt((1 - inner.beta2) * (1 - inner.beta1**2 / inner.beta2))
        for start in range(0, len(first), PIECE):
            part = slice(start, start + PIECE)
            if (np.abs(first[part]) > np.float32(most * ROUNDING) * np.sqrt(second[part]) + TINY).any():
                return f"first moments of more than {most:.3g} times the root of the second"
    total = float(np.sum(second, dtype=np.float64))
    if inner.clip_norm and total > ROUNDING * inner.clip_norm**2:
        return f"second moments that add up to {total:.3g}: gradients are clipped to {inner.clip_norm:g}"
    return ""
