"""The outer step of a stage: what its replicas contribute, what results, and the round in which they take it.

`MeanStep` is Pier's step (outer/pier.py) on the mean of the replicas' Δ = φ − θ, weighted by the number of microbatches
w that each has seen since the last outer step. No replica knows the others' w beforehand. So each sends w·Δ followed by
w, and all divide by the mean of w. A codec leaves w exact; what it drops of w·Δ, a replica adds to its next w·Δ (error
feedback). `PairStep` is NoLoCo's step (outer/noloco.py): pairs of replicas take the plain mean
of their θ, and of their φ if γ ≠ β, and each one steps from its own φ and δ. A weighted mean of φ would shift the mean
over all replicas.

A `ReplicaRound` results in the stage's next state and a digest on which all replicas that met agree. The name of the
attempt covers the digest, so the deciding round is about exactly these bits. A site without another replica takes the
step alone, because the loss of a replica must not change what a step of its stage is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import NolocoSection, OuterSection
from pier_node.outer.codec import codec
from pier_node.outer.codec.interface import Codec
from pier_node.outer.mean import Update
from pier_node.outer.noloco import needs_anchors, noloco_step
from pier_node.outer.pier import outer_step, pseudo_gradient
from pier_node.outer.schedule import lr_at, momentum_at
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.context import Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import PLAIN, Joint, Overflow
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_proto.v1.peer_pb2 import Total

Tensors = Mapping[str, SharedVector]
ROUNDING = 1e-5
"""Relative rounding error that a sum of counts in fp32 may have."""


class OuterStep(Protocol):
    """An outer algorithm.

    Attributes:
        pairs: replicas meet in pairs, and may differ afterwards.
        codec: how the vectors travel.
    """

    pairs: bool
    codec: Codec

    def brought(self, anchor: Vector, weights: Vector, microbatches: int, /) -> Vector:
        """The vector that a replica with weights θ and anchor φ sends."""
        ...

    def after(self, base: OuterState, mean: Vector) -> Tensors:
        """The stage's anchor and momentum after the step; empty: the stage does not move."""
        ...


class MeanStep:
    """A step of all replicas together; they are equal afterwards."""

    pairs = False

    def __init__(self, momentum: float, lr: float, codec: Codec = PLAIN) -> None:
        self._momentum, self._lr, self.codec = momentum, lr, codec

    def brought(self, anchor: Vector, weights: Vector, microbatches: int) -> Vector:
        """Shape [parameters + 1]: w·(φ − θ), then w."""
        vector = np.empty(len(anchor) + 1, np.float32)
        pseudo_gradient(anchor, weights, out=vector[:-1])
        vector[:-1] *= np.float32(microbatches)
        vector[-1] = microbatches
        return vector

    def after(self, base: OuterState, mean: Vector) -> Tensors:
        """Empty if no replica has seen any microbatch."""
        if mean[-1] == 0:
            return {}
        delta, tensors = mean[:-1] / mean[-1], _tensors(base)
        outer_step(
            base.anchor, base.momentum, delta, self._momentum, self._lr, tensors[ANCHOR].array, tensors[MOMENTUM].array
        )
        return tensors


class PairStep:
    """A step of two replicas, or of one that is left over."""

    pairs = True

    def __init__(self, rates: NolocoSection, codec: Codec = PLAIN) -> None:
        self._rates, self.codec = rates, codec

    def brought(self, anchor: Vector, weights: Vector, _microbatches: int) -> Vector:
        """Shape [parameters]: θ; or [2·parameters]: θ and φ, if φ is needed."""
        return np.concatenate((weights, anchor)) if needs_anchors(self._rates) else weights

    def after(self, base: OuterState, mean: Vector) -> Tensors:
        """Never empty: other pairs may move the stage, and all its replicas must have one version."""
        tensors, length = _tensors(base), len(base.anchor)
        anchors = mean[length:] if needs_anchors(self._rates) else None
        out = tensors[ANCHOR].array, tensors[MOMENTUM].array
        noloco_step(base.anchor, base.momentum, mean[:length], anchors, self._rates, *out)
        return tensors


def demand_weight(mean: Vector, own: Vector, sites: int) -> None:
    """Raise Suspicion unless the mean weight is possible for that many sites, of which one sent `own`.

    The weight comes from other sites, and everything is divided by it. Microbatches are whole numbers: their sum is at
    least what this site has seen, and at least 1 if there are any.
    """
    total, least = float(mean[-1]) * sites, max(float(own[-1]), 1.0) * (1 - ROUNDING)
    if not ((total == 0 and own[-1] == 0) or total >= least):
        raise Suspicion(NOBODY, f"the replicas have seen {total:g} microbatches, of which {own[-1]:g} came here")


def step_of(outer: OuterSection, done: float) -> OuterStep:
    """The outer step of a run of which the fraction `done`, from 0 to 1, is completed."""
    if outer.algorithm == "noloco":
        return PairStep(outer.noloco, codec(outer.codec))
    return MeanStep(momentum_at(outer, done), lr_at(outer, done), codec(outer.codec))


def _tensors(base: OuterState) -> dict[str, SharedVector]:
    return {name: SharedVector.scratch(len(base.anchor)) for name in (ANCHOR, MOMENTUM)}


@dataclass(frozen=True)
class Met:
    """The result: the stage's tensors, empty if it did not move, and the totals of all stages.

    `error` is what a lossy codec dropped, of the shape that was sent.
    """

    tensors: Tensors
    total: Total
    error: SharedVector | None


class ReplicaRound(Joint[Met]):
    """This site's part in the outer round.

    Args:
        brought: returns what this replica sends. It blocks.
    """

    def __init__(
        self, tools: Tools, plan: Plan, step: OuterStep, base: OuterState, brought: Callable[[], Update]
    ) -> None:
        super().__init__(tools, plan, step.pairs)
        self._step, self._base, self._brought = step, base, brought

    async def _work(self) -> Met:
        own, codec = await asyncio.to_thread(self._brought), self._step.codec
        error = SharedVector(len(own.vector)) if codec.lossy else None
        own = replace(own, error=error.array if error else None)
        mean = np.zeros(len(own.vector), np.float32)
        await self._reduce(dict.fromkeys(self.plan.stages, 1), own, mean, codec, self._tools.faults)
        if not self._step.pairs:
            demand_weight(mean, own.vector, len(self.plan.group(self._node, pairs=False)))
        tensors = await asyncio.to_thread(self._step.after, self._base, mean)
        digest = await asyncio.to_thread(self._digest, mean, tensors)
        await self._tools.faults.reach(self.plan.round, "summed")
        total = await self._total(self._worked(digest=digest))
        told = dict(zip(total.moved, total.digests))
        if not self._step.pairs and told.get(self.plan.stages[self._node], b"") != digest:
            raise Suspicion(self._aggregator, "has told other bits of this stage than these")
        return Met(tensors, total, error)

    def _digest(self, mean: Vector, tensors: Tensors) -> bytes:
        """Digest of what the sites that met share after the step; empty: the stage did not move.

        Blocks. Raises Overflow.
        """
        if not all(bool(np.isfinite(vector.array).all()) for vector in tensors.values()):
            raise Overflow("the outer step")
        if self._step.pairs:
            return hashlib.sha256(mean.tobytes()).digest()
        return OuterState(0, (), tensors, {}).digest if tensors else b""
