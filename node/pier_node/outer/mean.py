"""Means of what the members of a round send, and the split of the vector into shards that the members average.

The plain rule is the token-weighted mean Σ w·x / Σ w, where w is the tokens that a member trained on since its last
round, capped (weights.py). With equal weights it is the mean of DiLoCo (arXiv 2311.08105) and Pier (arXiv 2511.17849).
The trimmed mean averages the middle third of the weight in each place, after Yin et al., "Byzantine-Robust Distributed
Learning: Towards Optimal Statistical Rates" (arXiv 1803.01498), which has equal weights.

Shards are sized to each member's bandwidth. Member i with the fraction f_i of a vector of V bytes sends (1 − f_i)·V to
the other owners and f_i·V to each of the n − 1 others: V·(1 + f_i·(n − 2)) in all, and receives as much. The slowest
link decides, so we minimise

    max_i (1 + f_i·(n − 2)) / b_i     with  Σ f_i = 1,  f_i ≥ 0.

At the optimum every member with f_i > 0 takes the same time t, so f_i(t) = max(0, (t·b_i − 1) / (n − 2)). Σ f_i(t) is
non-decreasing in t, and t is found by walking through the members from the fastest down. With n ≤ 2 every split costs
the same. Compare hivemind's load balancing, which solves the same problem as a linear program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from pier_node.base.shared import Vector

Mean = Callable[[Sequence[Vector], Sequence[np.float32], Vector], None]
"""(vectors of equal length, relative weights, out)."""


def relative_weights(tokens: Sequence[float]) -> list[np.float32]:
    """Weights relative to the largest: equal tokens give exactly 1, so their mean is the plain mean to the last bit."""
    largest = max(tokens, default=0) or 1
    return [np.float32(count / largest) for count in tokens]


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
    """Mean of vectors of equal length, summed in the given order; zero if there are none."""
    if not vectors:
        out.fill(0)
        return
    total = vectors[0]
    if weights[0] != 1 or len(vectors) == 1:
        total = np.multiply(total, weights[0], out=out)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total = np.add(total, vector if weight == 1 else vector * weight, out=out)
    np.divide(out, np.float32(sum(weights, start=np.float32(0))), out=out)


def trimmed_mean(vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
    """Mean in each place, without the third of the weight with the largest values and the third with the smallest."""
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
    """Sort each place by value, with weights; for a few long vectors, comparing neighbors is the fastest way."""
    pairs = [(vector, np.full_like(vector, weight)) for vector, weight in zip(vectors, weights, strict=True)]
    for end in range(len(pairs) - 1, 0, -1):
        for number in range(end):
            (low, light), (high, heavy) = pairs[number : number + 2]
            swap = low > high
            pairs[number] = np.minimum(low, high), np.where(swap, heavy, light)
            pairs[number + 1] = np.maximum(low, high), np.where(swap, light, heavy)
    return pairs


TALLEST = 100.0
"""A measured bandwidth counts for at most this many times the median."""


def fractions(bandwidths: Sequence[float]) -> list[float]:
    """The fraction of the vector that each member reduces; a bandwidth below 1 byte/s counts as unknown."""
    count = len(bandwidths)
    rates = _plausible(bandwidths)
    if count <= 2:
        return [1 / count] * count
    fastest = sorted(rates, reverse=True)
    total, time = 0.0, 0.0
    for owners, rate in enumerate(fastest, start=1):
        total += rate
        time = (count - 2 + owners) / total
        if owners == count or time * fastest[owners] <= 1:
            break
    shares = [max(0.0, (time * rate - 1) / (count - 2)) for rate in rates]
    return [share / sum(shares) for share in shares]


def split(length: int, bandwidths: Sequence[float]) -> list[tuple[int, int]]:
    """Shards (offset, length), in member order, that cover `length` elements exactly."""
    bounds, done = [0], 0.0
    for share in fractions(bandwidths):
        done += share
        bounds.append(min(length, round(done * length)))
    bounds[-1] = length
    return [(start, end - start) for start, end in pairwise(bounds)]


def _plausible(bandwidths: Sequence[float]) -> list[float]:
    known = sorted(rate for rate in bandwidths if rate >= 1)
    typical = known[len(known) // 2] if known else 1.0
    return [min(max(rate, typical / TALLEST), typical * TALLEST) if rate >= 1 else typical for rate in bandwidths]
