"""A site's progress in its run: its loop writes it; pulses, checkpoints and the status page read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pier_node.base.units import printable
from pier_node.engine.device import Device
from pier_node.engine.messages import SAMPLE
from pier_node.outer.times import Spans, Times
from pier_proto.v1.peer_pb2 import Phase


@dataclass
class Progress:
    """Where this site is in its run. Losses are in nats per token, times in seconds.

    Attributes:
        gradient_norm: of the last step that was reported, before clipping.
        inner_step: inner steps of the run, done here or by the sites that this one caught up from.
        tokens: tokens that this site has trained on, steps under way included.
        compute: seconds spent in inner steps; `waited`: seconds spent in outer rounds, waiting included.
        round_time: seconds that the last outer round took.
        times: how the last outer round spent its time.
        spans: how a pipeline's last iteration spent its time.
        expert: the expert that this site trains and its progress, in words; "" if none.
        members_loss: mean validation loss of the models that were merged at the end.
        training_for: the round that the current inner steps count for; `steps`: how many steps (fewer at a slow site).
        metrics: what the site's program has logged last, by name: see engine/messages.py.
        spread: standard deviation between replicas in this site's last pair; not known where all replicas are equal.
    """

    phase: Phase.ValueType = Phase.PHASE_STARTING
    inner_step: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    loss: float = math.nan
    gradient_norm: float = math.nan
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
    device: Device = field(default_factory=Device)
    metrics: dict[str, float | str] = field(default_factory=dict)

    @property
    def sample(self) -> str:
        """Text that the model has written last, without what does not print; "" if it is not known."""
        return printable(text) if isinstance(text := self.metrics.get(SAMPLE), str) else ""
