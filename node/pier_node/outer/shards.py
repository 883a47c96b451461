"""Who reduces how much of the vector: shards sized to each member's bandwidth.

Member i with the fraction f_i of a vector of V bytes sends (1 − f_i)·V to the other owners and f_i·V to each of the
n − 1 others: V·(1 + f_i·(n − 2)) in all, and receives as much. The slowest link decides, so we minimise

    max_i (1 + f_i·(n − 2)) / b_i     with  Σ f_i = 1,  f_i ≥ 0.

At the optimum every member with f_i > 0 takes the same time t, so f_i(t) = max(0, (t·b_i − 1) / (n − 2)); Σ f_i(t) is
non-decreasing in t, and t is found by walking through the members from the fastest down. With n ≤ 2 any split costs
the same. Compare hivemind's load balancing, which solves the same problem as a linear programme.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TALLEST = 100.0
"""A measured bandwidth is not trusted beyond this many times the median."""


def fractions(bandwidths: Sequence[float]) -> list[float]:
    """The fraction of the vector that each member reduces; below 1 byte a second it counts as not known yet."""
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
    """Shards (offset, length) in member order that cover `length` elements exactly."""
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
