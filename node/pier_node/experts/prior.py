"""Which experts a text is for, before its first token: fitted on rows of its domain, never on rows that are scored.

The prior is an exponential mean of the rows' posteriors with a floor (spec/hdee.md section 2.7). The update that HDEE's
code uses takes the last prior into the next posterior, and ends at one expert even between equals (7.2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pier_node.experts.mixture import follow
from pier_node.experts.weights import Array, Rule

FORGETTING = 0.3
"""λ, weight of the newest row (BTM's and DEMix's code)."""
FLOOR = 0.01
"""ε: each of K experts has at least ε / K; it costs a row ln(1 / (1 - ε)) nats at most."""


def even(experts: int) -> Array:
    """The same for all."""
    return np.full(experts, 1 / experts)


def fitted(rule: Rule, log_probs: Array, forgetting: float = FORGETTING, floor: float = FLOOR) -> Array:
    """The prior that rows of a text suggest.

    Args:
        log_probs: what the experts gave the rows' tokens, [experts, rows, tokens].

    Returns:
        [experts], with sum 1, none below floor / experts. Every row's posterior begins with the same weight for all,
        so that the prior does not feed on itself.
    """
    posteriors = np.exp(follow(rule, even(len(log_probs)), log_probs)).mean(axis=-1)  # [experts, rows]
    prior = even(len(log_probs))
    for row in posteriors.T:
        prior = (1 - forgetting) * prior + forgetting * row
    return floored(prior / prior.sum(), floor)


def floored(prior: Array, floor: float = FLOOR) -> Array:
    """A little of `floor` for everybody, [experts]."""
    return (1 - floor) * prior + floor / len(prior)


def chosen(prior: Array, most: int) -> tuple[npt.NDArray[np.intp], Array]:
    """The experts that answer: the `most` likeliest ones (0: all), and among equals those that come first.

    Returns:
        Their indices in ascending order, int [k], and their prior with sum 1, [k].
    """
    best = np.sort(np.argsort(-prior, kind="stable")[: most or None])
    return best, prior[best] / prior[best].sum()
