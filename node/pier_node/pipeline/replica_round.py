"""An outer round of the replicas at one site: the mean of what they did apart, and the outer step of their stage.

The result is the stage's next state and a digest on which all replicas that met agree. The name of the attempt covers
the digest, so the deciding round is about exactly these bits. A site without another replica takes the step alone,
because the loss of a replica must not change what a step of its stage is.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

import numpy as np

from pier_node.base.shared import Vector
from pier_node.outer.state import OuterState
from pier_node.pipeline.context import Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import Diverged, Joint
from pier_node.pipeline.outer_step import OuterStep, Tensors, demand_weight
from pier_node.pipeline.stage_state import StageState
from pier_node.rounds.suspects import Suspicion
from pier_proto.v1.peer_pb2 import Total


@dataclass(frozen=True)
class Met:
    """The result: the stage's tensors, empty if it did not move, and the totals of all stages."""

    tensors: Tensors
    total: Total


class ReplicaRound(Joint[Met]):
    """This site's part in the outer round.

    Args:
        step: the outer step to take.
    """

    def __init__(self, tools: Tools, plan: Plan, stage_state: StageState, step: OuterStep) -> None:
        super().__init__(tools, plan, step.pairs)
        self._stage_state, self._step = stage_state, step

    async def _work(self) -> Met:
        base, own = self._stage_state.state, await asyncio.to_thread(self._stage_state.brought, self._step)
        assert base
        mean = np.zeros(len(own), np.float32)
        equal = dict.fromkeys(self.plan.stages, 1)
        await self._reduce(equal, own, mean, self._tools.faults)
        if not self._step.pairs:
            demand_weight(mean, own, len(self.plan.group(self._node, pairs=False)))
        tensors = await asyncio.to_thread(self._step.after, base, mean)
        digest = await asyncio.to_thread(self._digest, mean, tensors)
        await self._tools.faults.reach(self.plan.round, "summed")
        total = await self._total(self._worked(digest=digest))
        told = dict(zip(total.moved, total.digests))
        if not self._step.pairs and told.get(self.plan.stages[self._node], b"") != digest:
            raise Suspicion(self._aggregator, "has told other bits of this stage than these")
        return Met(tensors, total)

    def _digest(self, mean: Vector, tensors: Tensors) -> bytes:
        """Digest of what the sites that met share after the step; empty: the stage did not move.

        Blocks. Raises Diverged.
        """
        if not all(bool(np.isfinite(vector.array).all()) for vector in tensors.values()):
            raise Diverged("the outer step")
        if self._step.pairs:
            return hashlib.sha256(mean.tobytes()).digest()
        return OuterState(0, (), tensors, {}).digest if tensors else b""
