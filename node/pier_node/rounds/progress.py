"""Where a site is in its run: written by its loop, read by pulses, checkpoints and people."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pier_node.outer.times import Spans, Times
from pier_proto.v1.peer_pb2 import Phase


@dataclass
class Progress:
    """Where this site is: for its pulse, its checkpoints and people. Losses are nats a token; times are seconds.

    Attributes:
        inner_step: of the run, done here or by those it was caught up from.
        tokens: trained on by this site, steps under way included.
        compute: spent in inner steps; `waited`: spent in outer rounds, their waiting included.
        round_time: what the last outer round took.
        times: where the time of the last outer round went.
        spans: where the time of a pipeline's last iteration went.
        expert: the one that this site trains, and how far it is, in words; "": none.
        members_loss: mean validation loss of the models that were merged at the end.
        training_for: the round that the present inner steps are brought to; `steps`: so many, fewer at a slow site.
        spread: standard deviation between replicas, as this site's last pair saw it; of equal replicas it is not known.
    """

    phase: Phase.ValueType = Phase.PHASE_STARTING
    inner_step: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    loss: float = math.nan
    validation_loss: float = math.nan
    validated_round: int = -1
    compute: float = 0.0
    waited: float = 0.0
    round_time: float = 0.0
    times: Times = field(default_factory=Times)
    spans: Spans | None = None
    training_for: int = 0
    steps: int = 0
    spread: float = math.nan
    members_loss: float = math.nan
    expert: str = ""
