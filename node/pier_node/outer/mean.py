"""The token-weighted mean of what the members of a round send: Σ w·x / Σ w (spec/pier.md section 2).

And the same of the middle third of the tokens in each place: a trimmed mean, after Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates" (arXiv 1803.01498), there of equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pier_node.shared import Vector

Mean = Callable[[Sequence[Vector], Sequence[np.float32], Vector], None]
"""(equally long vectors, relative weights, out)."""


def relative_weights(tokens: Sequence[float]) -> list[np.float32]:
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


def trimmed_mean(vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
    """In each place without the third of the weight that has the largest values, and that which has the smallest."""
    out.fill(0)
    if not vectors:
        return
    whole = sum(weights, start=np.float32(0))
    first, last, done = whole / 3, whole * 2 / 3, np.zeros(len(out), np.float32)
    for value, weight in _sorted(vectors, weights):
        end = done + weight
        kept = np.clip(np.minimum(end, last) - np.maximum(done, first), 0, None)
        np.add(out, value * kept, out=out)
        done = end
    np.divide(out, last - first, out=out)


def _sorted(vectors: Sequence[Vector], weights: Sequence[np.float32]) -> list[tuple[Vector, Vector]]:
    """In each place by value, with their weights; a few long vectors are sorted fastest by comparing neighbours."""
    pairs = [(vector, np.full_like(vector, weight)) for vector, weight in zip(vectors, weights, strict=True)]
    for end in range(len(pairs) - 1, 0, -1):
        for number in range(end):
            (low, light), (high, heavy) = pairs[number : number + 2]
            swap = low > high
            pairs[number] = np.minimum(low, high), np.where(swap, heavy, light)
            pairs[number + 1] = np.maximum(low, high), np.where(swap, light, heavy)
    return pairs
