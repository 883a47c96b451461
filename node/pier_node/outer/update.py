"""What a site brings to a round; and what it does not bring, because the others would refuse it."""

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
"""An update may not be longer than this many times the model itself."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """A vector of the length that the round syncs, and its weight.

    Attributes:
        error: takes what a lossy codec drops of it, same shape; None with a codec that drops nothing.
    """

    vector: Vector
    tokens: int
    error: Vector | None = None

    @cached_property
    def norm(self) -> float:
        """L2 norm of what is sent: without tokens that is nothing."""
        return l2_norm(self.vector) if self.tokens else 0.0


def norm_limit(norm: float) -> float:
    """The largest L2 norm that an update to the round after an anchor of this norm may have."""
    return NORM_LIMIT * max(1.0, norm)


def worth_sending(plan: RoundPlan, update: Update, anchor: Vector) -> Update:
    """The update; an empty one, which is logged, if training went astray.

    Raises:
        PierError: it did so in a solo start, where nobody else has anything either.
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
