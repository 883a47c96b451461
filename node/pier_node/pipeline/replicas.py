"""The mean over replicas of a stage, of their gradients or of what they did apart; equal in every bit.

It is the reduce-scatter and all-gather of the outer rounds (outer/reduce.py) within one attempt, so that any replica
can give its stage to a site that comes back. Gradients are not clipped here: all stages together are, by their global
norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pier.v1.peer_pb2 import Ballot, Chunk, Share
from pier_node.faults import Faults
from pier_node.outer import plan as outer
from pier_node.outer.codec.plain import Plain
from pier_node.outer.contribution import Contribution
from pier_node.outer.reduce import Reduction
from pier_node.outer.shards import split
from pier_node.pipeline.itinerary import Plan
from pier_node.shared import Vector
from pier_node.wire.carrier import Carrier

LONGEST = 1e9
"""Norm that no gradient has."""


@dataclass(frozen=True)
class StagePlan(outer.Plan):
    """The plan of a reduction that is told apart by the name of its attempt."""

    name: bytes = b""

    def message(self, stage: Chunk.Stage.ValueType, offset: int, data: bytes) -> Chunk:
        """A chunk of this attempt."""
        return Chunk(round=self.round, stage=stage, offset=offset, data=data, meeting=self.name)


def reduction(
    carrier: Carrier,
    plan: Plan,
    nodes: Sequence[str],
    weights: Mapping[str, int],
    own: Vector,
    mean: Vector,
    silence: float,
    faults: Faults,
) -> Reduction | None:
    """This site's part; None if it is the only one.

    Args:
        nodes: who takes the mean, this site among them.
        weights: of the replicas' vectors, by node id; those of weight 0 do not travel.
        own: this site's vector.
        mean: takes the mean, as long.
    """
    if len(nodes) == 1:
        return None
    parts = split(len(mean), [1.0] * len(nodes))
    shares = [
        Share(node=node, tokens=weights[node], norm=LONGEST, offset=offset, length=length)
        for node, (offset, length) in zip(nodes, parts, strict=True)
    ]
    named = StagePlan(plan.round, Ballot(), shares, LONGEST, silence, name=plan.name)
    return Reduction(carrier, named, Contribution(own, weights[carrier.node]), mean, Plain(), faults)


def square(gradient: Vector) -> float:
    """Of the gradient's norm, summed in double precision."""
    return float(np.square(gradient, dtype=np.float64).sum())
