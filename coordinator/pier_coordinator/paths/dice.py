"""Random numbers for compiled code: splitmix64, the same on every machine and in every version of a library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pier_coordinator.paths.compiled import compiled

Dice = NDArray[np.uint64]


def dice(seed: int) -> Dice:
    """A stream of its own for each seed."""
    return np.array([seed % 2**64], np.uint64)


@compiled
def uniform(dice: Dice) -> float:
    """From 0 to below 1."""
    dice[0] += np.uint64(0x9E3779B97F4A7C15)
    z = dice[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def below(dice: Dice, count: int) -> int:
    """From 0 to count - 1."""
    return int(uniform(dice) * count)
