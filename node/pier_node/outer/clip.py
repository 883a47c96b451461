"""Clipping: limits how far one member can move the model in a round by shortening updates much longer than usual.

The usual norm is the median of the members' norms. Each member counts with its tokens, but with at most the median of
the tokens. So a single member, whatever it claims, never makes up half of the votes (of two members, the shorter update
is the usual one). A member with more tokens than the median may bring a proportionally longer update, up to what all
inner steps of a round allow. Without clipping, a site with 0.6 % of the data moved a model by 5.5 times its own norm
(MediSwarm, issue 566). Each member announces its norm with its tokens, so all owners of shards clip by the same
factors.

An owner sees only its own shard of a member's update. It refuses a shard that is longer than the norm announced for the
whole update: with n shards, a liar gets at most √n times its share through. The owners' means are bounded likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pier_node.outer.token_weights import usual_tokens

LONGEST = 3.0
"""Limit as a multiple of the median norm, for members with no more tokens than the median."""
EXACT, LOSSY = 1.01, 2.0
"""How much longer than announced an update may appear: with rounding only, and with a lossy codec."""


def median_norm(norms: Sequence[float], tokens: Sequence[int]) -> float:
    """The usual norm: the smallest norm that covers half of the counted tokens, or 0 if no update has a length.

    Each member counts with at most the median of the members' tokens.
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
    """Largest allowed norm of each member's update.

    Args:
        whole: tokens of a site that does all inner steps of a round; see weights.py.
    """
    longest, usual = LONGEST * median_norm(norms, tokens), usual_tokens(tokens)
    return [longest * max(1.0, min(count, whole) / usual) if usual else longest for count in tokens]


def clip_factors(norms: Sequence[float], tokens: Sequence[int], whole: int) -> list[float]:
    """The factor that each member's update is multiplied by, at most 1."""
    limits = longest_updates(norms, tokens, whole)
    return [
        limit / norm if count and norm > limit * EXACT else 1.0
        for norm, count, limit in zip(norms, tokens, limits, strict=True)
    ]


def longest_mean(norms: Sequence[float], tokens: Sequence[int], whole: int) -> float:
    """Largest L2 norm that a mean of the clipped updates can have, weighted or trimmed."""
    longest = max(longest_updates(norms, tokens, whole), default=0.0)
    return longest * math.sqrt(np.count_nonzero(tokens))
