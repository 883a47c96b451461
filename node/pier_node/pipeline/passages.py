"""Activations and gradients on their way between the sites of one attempt: what is sent, and what is taken from whom.

A tensor is taken if the plan says that it comes to this site now, from this sender, once, in this shape and dtype, and
if it is finite. Everything else is refused with the reason, and changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import torch
from torch import Tensor

from pier.v1.peer_pb2 import Chunk, Passage
from pier_node.outer.sending import send
from pier_node.pipeline.itinerary import Plan, Task
from pier_node.pipeline.tensors import Arriving, passage_of, pieces
from pier_node.wire.carrier import BadMessage, Carrier, PeerLost


class Passages:
    """This site's end of an attempt's streams.

    Args:
        shape: of every tensor that travels, [sequences, time, dim].
    """

    def __init__(self, carrier: Carrier, plan: Plan, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._carrier, self._plan = carrier, plan
        self._shape, self._dtype = [*shape], dtype
        self._taking: set[Task] = set()
        self._here: dict[Task, Tensor] = {}
        self.closed = False

    def put(self, task: Task, tensor: Tensor) -> None:
        """What comes from this site itself."""
        self._taking.add(task)
        self._here[task] = tensor

    def pop(self, task: Task) -> Tensor:
        """What a task works on, once."""
        return self._here.pop(task)

    async def send(self, task: Task, tensor: Tensor) -> None:
        """Send what a task works on to where it is done. Raises Suspicion."""
        microbatch, hop = task
        node = self._plan.ways[microbatch][hop]
        chunks = _stream(passage_of(self._plan.name, microbatch, hop, tensor), tensor, self._plan.round)
        await send(self._carrier, node, chunks)

    async def take(self, sender: str, passage: Passage, rest: AsyncIterator[Chunk]) -> Task:
        """Take a tensor that a site streams. Raises BadMessage, PeerLost."""
        task = self._expected(sender, passage)
        arriving = Arriving(passage, self._shape, self._dtype)
        self._taking.add(task)
        try:
            async for chunk in rest:
                arriving.add(chunk)
            tensor = arriving.whole()
            if self.closed:
                raise BadMessage("late: that attempt is over")
        except (BadMessage, PeerLost):
            self._taking.discard(task)
            raise
        self._here[task] = tensor
        return task

    def _expected(self, sender: str, passage: Passage) -> Task:
        """The task that a tensor is for. Raises BadMessage: it is for none of ours, or not from this sender."""
        microbatch, hop = passage.microbatch, passage.hop
        if self.closed:
            raise BadMessage("late: that attempt is over")
        if microbatch >= len(self._plan.ways) or not 0 < hop < len(self._plan.ways[microbatch]):
            raise BadMessage(f"microbatch {microbatch}, hop {hop}: the plan has none")
        way = self._plan.ways[microbatch]
        if way[hop] != self._carrier.node or way[hop - 1] != sender:
            raise BadMessage(
                f"microbatch {microbatch}, hop {hop}: the plan leads from {way[hop - 1]} to {way[hop]}, "
                f"not from {sender} to {self._carrier.node}"
            )
        if (microbatch, hop) in self._taking:
            raise BadMessage(f"microbatch {microbatch}, hop {hop}: it is here already")
        return microbatch, hop


async def _stream(passage: Passage, tensor: Tensor, round: int) -> AsyncGenerator[Chunk]:
    for chunk in pieces(passage, tensor, round):
        yield chunk
