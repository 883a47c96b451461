"""The token-weighted mean of what the members of a round send: Σ w·x / Σ w (spec/pier.md section 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pier_node.shared import Vector


def relative_weights(tokens: Sequence[int]) -> list[np.float32]:
    """Weights over the largest: equal tokens give exactly 1, so that their mean is the plain mean to the last bit."""
    largest = max(tokens, default=0) or 1
    return [np.float32(count / largest) for count in tokens]


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
    """Mean of equally long vectors, summed in the given order; none at all mean zero."""
    if not vectors:
        out.fill(0)
        return
    np.multiply(vectors[0], weights[0], out=out)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        np.add(out, vector if weight == 1 else vector * weight, out=out)
    np.divide(out, np.float32(sum(weights, start=np.float32(0))), out=out)
