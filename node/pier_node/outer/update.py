"""The update that a site brings to a round, and the check that drops an update which the others would refuse."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.outer.state import l2_norm

NORM_LIMIT = 100.0
"""Limit on the norm of an update, as a multiple of the norm of the model."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """A vector of the length that the round syncs, with its weight in tokens.

    Attributes:
        error: receives what a lossy codec drops of the vector, same shape; None with a lossless codec.
    """

    vector: Vector
    tokens: int
    error: Vector | None = None

    @cached_property
    def norm(self) -> float:
        """L2 norm of what is sent; 0 for an update without tokens, which is not sent."""
        return l2_norm(self.vector) if self.tokens else 0.0


def norm_limit(norm: float) -> float:
    """The largest L2 norm of an update to the round that follows an anchor of this norm."""
    return NORM_LIMIT * max(1.0, norm)


def worth_sending(plan: RoundPlan, update: Update, anchor: Vector) -> Update:
    """The update, or an empty one (which is logged) if training diverged.

    Raises:
        PierError: training diverged in a solo start, where no other site has an update either.
    """
    norm, limit = update.norm, norm_limit(l2_norm(anchor))
    if plan.kind is Kind.SOLO and not math.isfinite(norm):
        raise PierError(
            f"round {plan.round}: training diverged: the weights are not finite any more",
            "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
        )
    if plan.kind is Kind.SOLO or norm <= limit:
        return update
    log.error("round %d: this site's update is dropped: its norm is %.3g: lower inner.lr?", plan.round, norm)
    return Update(np.zeros_like(update.vector), 0)
