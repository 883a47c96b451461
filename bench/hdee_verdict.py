"""Who wins, by the decision rule of bench/hdee.py: gaps between two arms on the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pier_node.experts.mixture import Array

DRAWS = 2000
LEVEL, OF_TWO = 0.95, 0.975
"""Of an interval; of each of two, the better of which counts (Bonferroni)."""

Verdict = Literal["win", "tie", "loss"]


@dataclass(frozen=True)
class Gap:
    """Bits per byte that an arm has more than another: the seeds' mean, its interval, and each seed's."""

    mean: float
    low: float
    high: float
    seeds: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        """A win or a loss if the interval has no 0 in it and all seeds agree."""
        if self.high < 0 and max(self.seeds) < 0:
            return "win"
        return "loss" if self.low > 0 and min(self.seeds) > 0 else "tie"


def gap(own: Sequence[Array], other: Sequence[Array], level: float = LEVEL) -> Gap:
    """The gap in the mean of some domains, which count alike.

    Args:
        own, other: bits per byte of each domain, [seeds, rows]; rows are the same in both.
    """
    random = np.random.default_rng(0)
    gaps = [one - two for one, two in zip(own, other, strict=True)]
    seeds = np.mean([each.mean(axis=1) for each in gaps], axis=0)
    drawn = np.zeros(DRAWS)
    for each in gaps:
        rows = each.mean(axis=0)
        drawn += rows[random.integers(0, len(rows), (DRAWS, len(rows)))].mean(axis=1) / len(gaps)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Gap(float(seeds.mean()), float(low), float(high), tuple(seeds.tolist()))


def best_of_two(one: Gap, other: Gap) -> Verdict:
    """Of two arms, both with intervals of the level OF_TWO, against the same third one."""
    verdicts = {one.verdict, other.verdict}
    if "win" in verdicts:
        return "win"
    return "loss" if verdicts == {"loss"} else "tie"


def sign_test(verdicts: Sequence[Verdict]) -> float:
    """The chance of so many wins or more among wins and losses, were both as likely."""
    wins, losses = verdicts.count("win"), verdicts.count("loss")
    ways = sum(math.comb(wins + losses, count) for count in range(wins, wins + losses + 1))
    return float(ways / 2 ** (wins + losses))
