"""How far one member may move the model in a round: an update that is much longer than usual is shortened.

Usual is the median of the members' norms. Each counts with its tokens, but with no more than the median of the tokens:
so a single member, whatever it claims, is never half of those that decide (for two members: the shorter update is the
usual one). Who trained on more than the median may bring a longer update, in proportion, up to what all inner steps of
a round allow. Without this a site with 0.6 % of the data moved a model by 5.5 times its own norm (MediSwarm, issue
566). Everyone announces its norm with its tokens, so that all owners of shards clip by the same factors.

An owner sees no more of a member than its own shard of it, and refuses what is longer there than was announced of the
whole: in n shards a liar gets through √n times its share, at most. An owner's mean is bounded likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pier_node.outer.weights import usual_tokens

LONGEST = 3.0
"""Times the median norm, for who brings no more tokens than the median."""
EXACT, LOSSY = 1.01, 2.0
"""How much longer than announced an update may seem: by rounding; by what a lossy codec makes of it."""


def median_norm(norms: Sequence[float], tokens: Sequence[int]) -> float:
    """The smallest norm that half of the tokens come with, or a smaller one, of those that have a length.

    Of each member no more tokens count than the median of the members' tokens.
    """
    usual = usual_tokens(tokens)
    pairs = sorted((norm, min(count, usual)) for norm, count in zip(norms, tokens, strict=True) if norm and count)
    half, done = sum(count for _, count in pairs) / 2, 0
    for norm, count in pairs:
        done += count
        if done >= half:
            return norm
    return 0.0


def longest_updates(norms: Sequence[float], tokens: Sequence[int], whole: int) -> list[float]:
    """Largest norm of each member's update.

    Args:
        whole: tokens of a site that does all inner steps of a round; see weights.py.
    """
    longest, usual = LONGEST * median_norm(norms, tokens), usual_tokens(tokens)
    return [longest * max(1.0, min(count, whole) / usual) if usual else longest for count in tokens]


def clip_factors(norms: Sequence[float], tokens: Sequence[int], whole: int) -> list[float]:
    """What each member's update is multiplied with, at most 1."""
    limits = longest_updates(norms, tokens, whole)
    return [
        limit / norm if count and norm > limit * EXACT else 1.0
        for norm, count, limit in zip(norms, tokens, limits, strict=True)
    ]


def longest_mean(norms: Sequence[float], tokens: Sequence[int], whole: int) -> float:
    """Largest L2 norm that a mean of the clipped updates can have, weighted or trimmed."""
    longest = max(longest_updates(norms, tokens, whole), default=0.0)
    return longest * math.sqrt(np.count_nonzero(tokens))
