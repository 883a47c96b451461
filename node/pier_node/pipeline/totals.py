"""What the sites of an attempt have worked out, gathered at the first of them."""

from __future__ import annotations

import hashlib

from pier.v1.peer_pb2 import Total, Worked
from pier_node.pipeline.itinerary import Plan
from pier_node.wire.carrier import BadMessage


class Totals:
    """Of one attempt.

    Args:
        pairs: replicas must have the same bits two by two; else all of a stage.

    The square of a stage's gradient is the mean of its replicas' squares, weighted by the microbatches that each saw:
    of replicas that have averaged it is that of each. So the norm by which gradients are clipped is, for all sites
    alike, what one would expect of one model whose stages are any of the replicas.
    """

    def __init__(self, plan: Plan, pairs: bool = False) -> None:
        self._plan, self._pairs = plan, pairs
        self._worked: dict[str, Worked] = {}

    def add(self, node: str, worked: Worked) -> None:
        """Note what a site says; the first time counts. Raises BadMessage."""
        stage = self._plan.stages.get(node)
        if stage is None:
            raise BadMessage(f"{node} takes no part in this attempt")
        for other in self._plan.group(node, self._pairs):
            if other in self._worked and self._worked[other].digest != worked.digest:
                raise BadMessage(f"{node} and {other} have other bits of stage {stage}")
        self._worked.setdefault(node, worked)

    def all(self) -> Total | None:
        """The sums over the visited stages, the mean loss, and what has moved; None: somebody has not said yet."""
        if len(self._worked) < len(self._plan.stages):
            return None
        losses = [self._worked[node].loss for node in self._plan.stages]
        digests = {stage: self._digest(stage) for stage in sorted({*self._plan.stages.values()})}
        moved = [stage for stage, digest in digests.items() if digest]
        return Total(
            square=sum(self._square(stage) for stage in sorted(self._plan.visited)),
            loss=sum(losses) / max(len(self._plan.ways), 1),
            moved=moved,
            digests=[digests[stage] for stage in moved],
        )

    def _digest(self, stage: int) -> bytes:
        """Of what its replicas have told: theirs, where it is the same."""
        told = [self._worked[node].digest for node in self._plan.replicas(stage)]
        return told[0] if len({*told}) == 1 else hashlib.sha256(b"".join(told)).digest()

    def _square(self, stage: int) -> float:
        weights, nodes = self._plan.weights, self._plan.replicas(stage)
        return sum(weights[it] * self._worked[it].square for it in nodes) / sum(weights[it] for it in nodes)
