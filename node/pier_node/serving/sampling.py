"""Which token comes next: temperature, and the smallest set that has so much of the probability (Holtzman, 2020)."""

from __future__ import annotations

import numpy as np

from pier_node.experts.weights import Array


def pick(log_probs: Array, temperature: float, top_p: float, random: np.random.Generator) -> int:
    """A token.

    Args:
        log_probs: [vocab].
        temperature: 0: the likeliest one, among equals the first; 1: as the distribution says.
        top_p: draw among the likeliest tokens that together have this much, after the temperature.
    """
    if temperature == 0:
        return int(log_probs.argmax())
    # Taking the maximum away first keeps a temperature near 0 from overflowing.
    with np.errstate(over="ignore"):
        chances = np.exp((log_probs - log_probs.max()) / temperature)
    chances /= chances.sum()
    if top_p < 1:
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[1:][before[1:] >= top_p]] = 0.0
        chances /= chances.sum()
    return int(random.choice(len(chances), p=chances))


def top(log_probs: Array, count: int) -> list[int]:
    """The `count` likeliest tokens, the likeliest first."""
    return [int(token) for token in np.argsort(-log_probs, kind="stable")[:count]]
