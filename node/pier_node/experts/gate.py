"""Whether an expert is worth having: better on its domain's dev split than its parent, by more than chance.

Spec/hdee.md section 2.8: by more than two standard errors, of a bootstrap over the rows. Rows are paired: both models
are scored on the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pier_node.experts.weights import Array

DRAWS = 1000
ERRORS = 2.0
"""Standard errors that an expert must be better by."""
WORST = 1000.0
"""Bits per byte that a row counts at most: what a model says that has run away, NaN, counts so."""


@dataclass(frozen=True)
class Verdict:
    """Bits per byte on the dev split; `standard_error` is that of parent_loss - loss."""

    loss: float
    parent_loss: float
    standard_error: float

    @property
    def accepted(self) -> bool:
        """Whether the expert takes its parent's place for the domain."""
        return self.parent_loss - self.loss > ERRORS * self.standard_error


def judged(expert: Array, parent: Array, seed: int = 0) -> Verdict:
    """The verdict on an expert; the same arguments give the same.

    Args:
        expert, parent: nats a byte of each row, [rows]; all rows are of one length.
    """
    own, other = (_bits(losses) for losses in (expert, parent))
    gains = other - own
    picks = np.random.default_rng(seed).integers(0, len(gains), (DRAWS, len(gains)))
    return Verdict(float(own.mean()), float(other.mean()), float(gains[picks].mean(axis=1).std(ddof=1)))


def _bits(losses: Array) -> Array:
    return np.minimum(np.nan_to_num(losses, nan=math.inf) / math.log(2), WORST)
