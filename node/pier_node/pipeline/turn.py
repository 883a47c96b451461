"""What the coming round of a pipeline is for: a pure function of the run's state, so that all sites agree on it."""

from __future__ import annotations

from enum import Enum

from pier_node.config import RunConfig
from pier_node.outer.schedule import stepwise
from pier_node.pipeline.tally import Standing


class Turn(Enum):
    """How a round moves the stages on."""

    TOGETHER = "together"
    """An iteration: the replicas of a stage average their gradients, and take the same step."""
    APART = "apart"
    """An iteration: each replica steps with the gradient of its own microbatches."""
    MEET = "meet"
    """No iteration: the replicas of each stage take an outer step with the mean of what they did apart."""


def turn_of(config: RunConfig, standing: Standing) -> Turn | None:
    """The kind of the round after a state; None: the run is over."""
    steps, total = standing.steps, config.inner.total_steps
    apart = steps - standing.met
    if apart and (steps >= total or apart >= config.outer.inner_steps):
        return Turn.MEET
    if steps >= total:
        return None
    return Turn.TOGETHER if steps < stepwise(config) else Turn.APART
