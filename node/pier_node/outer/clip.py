"""How far one member may move the model in a round: an update that is much longer than usual is shortened.

Usual is the median of the members' norms, weighted by tokens as the mean is: half of the round's tokens come with
updates that are no longer. Without this a site with 0.6 % of the data moved a model by 5.5 times its own norm
(MediSwarm, issue 566). Everyone announces its norm with its tokens, so that all owners of shards clip by the same
factors.

An owner sees no more of a member than its own shard of it, and refuses what is longer there than was announced of the
whole: in n shards a liar gets through √n times its share, at most. An owner's mean is bounded likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LONGEST = 3.0
"""Times the median norm."""
EXACT, LOSSY = 1.01, 2.0
"""How much longer than announced an update may seem: by rounding; by what a lossy codec makes of it."""


def median_norm(norms: Sequence[float], tokens: Sequence[int]) -> float:
    """The smallest norm that half of the tokens come with, or a smaller one; those of no length do not count."""
    pairs = sorted(pair for pair in zip(norms, tokens, strict=True) if all(pair))
    half, done = sum(count for _, count in pairs) / 2, 0
    for norm, count in pairs:
        done += count
        if done >= half:
            return norm
    return 0.0


def clip_factors(norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """What each member's update is multiplied with, at most 1."""
    longest = LONGEST * median_norm(norms, tokens)
    return [
        longest / norm if count and norm > longest * EXACT else 1.0 for norm, count in zip(norms, tokens, strict=True)
    ]


def longest_mean(norms: Sequence[float], tokens: Sequence[int]) -> float:
    """Largest L2 norm that a mean of the clipped updates can have, weighted or trimmed."""
    return LONGEST * median_norm(norms, tokens) * math.sqrt(np.count_nonzero(tokens))
