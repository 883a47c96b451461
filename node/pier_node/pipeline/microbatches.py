"""The microbatches of an iteration at one site: in which order it computes them, and where each goes next.

Tasks run in the order of the planner's simulator (pipeline/planning/simulator.py): earlier waves first, then earlier
arrivals, and the site's own new microbatches last. A forward needs a free memory slot, which its backward frees. If
paths return to an earlier stage, microbatches could wait for each other's slots in a cycle. In that case a new
microbatch waits until the one at its position in the previous wave is finished. Paths come from planner.py.

A site accepts an activation, or its gradient, if the plan says that it arrives at this site at this hop from this
sender, and if it arrives once and in the expected form (pipeline/activation_codec.py). Every other tensor is refused
with a reason and changes nothing. If only the values are wrong, the attempt ends, and the sender is suspected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import torch
from torch import Tensor

from pier_node.pipeline.activation_codec import Formats, TensorFormat, pieces
from pier_node.pipeline.iteration_plan import Plan, Task
from pier_node.rounds.reduce import send
from pier_node.wire.carrier import BadMessage, Carrier, Chunk, PeerLost
from pier_proto.v1.peer_pb2 import Activation


class MicrobatchQueue:
    """The tasks of one site in one attempt.

    Args:
        memory: number of microbatches in flight that the site can hold.
    """

    def __init__(self, plan: Plan, node: str, memory: int) -> None:
        self._plan, self._memory = plan, memory
        self._waiting: list[Task] = []
        self._held: set[int] = set()
        self._left = {*plan.tasks(node)}
        self._wave = {microbatch: number for number, wave in enumerate(plan.waves) for microbatch in wave}
        self._new = [[it for it in wave if plan.ways[it][0] == node] for wave in plan.waves]
        self._over: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether all tasks are done."""
        return not self._left

    @property
    def awaited(self) -> set[Task]:
        """Tasks whose input has not arrived yet."""
        return {task for task in self._left if task[1] > 0 and task not in self._waiting}

    def arrive(self, task: Task) -> None:
        """Queue a task whose input has arrived."""
        self._waiting.append(task)
        self._waiting.sort(key=lambda it: self._wave[it[0]])

    def next(self) -> Task | None:
        """Take the task to do now; None: nothing can be done."""
        for task in self._waiting:
            if not self._is_forward(task) or len(self._held) < self._memory:
                self._waiting.remove(task)
                return self._taken(task)
        fresh = self._fresh()
        return None if fresh is None or len(self._held) >= self._memory else self._taken((fresh, 0))

    def done(self, task: Task) -> None:
        """Mark a task as done."""
        microbatch, hop = task
        if hop > self._plan.length(microbatch):
            self._held.discard(microbatch)
        if hop == 2 * self._plan.length(microbatch):
            self._over.add(microbatch)
        self._left.discard(task)

    def _taken(self, task: Task) -> Task:
        if self._is_forward(task):
            self._held.add(task[0])
        return task

    def _is_forward(self, task: Task) -> bool:
        return task[1] < self._plan.length(task[0])

    def _fresh(self) -> int | None:
        """The next microbatch of this site to begin with."""
        before: list[int] = []
        for wave in self._new:
            for place, microbatch in enumerate(wave):
                begun = (microbatch, 0) not in self._left or microbatch in self._held
                if not begun:
                    free = self._plan.ascends or place >= len(before) or before[place] in self._over
                    return microbatch if free else None
            before = wave
        return None


class Activations:
    """This site's end of an attempt's streams."""

    def __init__(self, carrier: Carrier, plan: Plan, formats: Formats) -> None:
        self._carrier, self._plan, self._formats = carrier, plan, formats
        self._taking: set[Task] = set()
        self._here: dict[Task, Tensor] = {}
        self._closed = False

    def close(self) -> None:
        """Refuse every further tensor: the attempt is over."""
        self._closed = True

    def put(self, task: Task, tensor: Tensor) -> None:
        """Store the input of a task that this site produced itself."""
        self._taking.add(task)
        self._here[task] = tensor

    def pop(self, task: Task) -> Tensor:
        """Remove and return the input of a task."""
        return self._here.pop(task)

    async def encode(self, task: Task, tensor: Tensor) -> bytes:
        """Encode the input of a task for another site."""
        form = self._format(task)
        return await asyncio.to_thread(lambda: form.encode(tensor.float().contiguous().numpy()))

    async def send(self, task: Task, data: bytes, patience: float) -> None:
        """Send the encoded input of a task to the site that does the task. Raises Suspicion.

        Args:
            patience: seconds in which the site must take a chunk, and acknowledge the last.
        """
        microbatch, hop = task
        node = self._plan.ways[microbatch][hop]
        activation = self._format(task).activation(self._plan.name, microbatch, hop)
        await send(self._carrier, node, _stream(activation, data, self._plan.round), patience)

    async def take(self, sender: str, activation: Activation, rest: AsyncIterator[Chunk]) -> Task:
        """Receive a tensor that a site streams. Raises BadMessage, PeerLost."""
        task = self._expected(sender, activation)
        form = self._format(task)
        arriving = form.arriving(activation)
        self._taking.add(task)
        try:
            async for chunk in rest:
                arriving.add(chunk)
            values = await asyncio.to_thread(form.decode, arriving.whole())
            if self._closed:
                raise BadMessage("late: that attempt is over")
        except (BadMessage, PeerLost):
            self._taking.discard(task)
            raise
        self._here[task] = torch.from_numpy(values)
        return task

    def _format(self, task: Task) -> TensorFormat:
        """The form of a task's input: an activation up to the loss, a gradient after it."""
        microbatch, hop = task
        forward = hop <= self._plan.length(microbatch)
        return self._formats.activations if forward else self._formats.gradients

    def _expected(self, sender: str, activation: Activation) -> Task:
        """The task that a tensor is for. Raises BadMessage: it is for no task of this site, or not from this sender."""
        microbatch, hop = activation.microbatch, activation.hop
        if self._closed:
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


async def _stream(activation: Activation, data: bytes, round: int) -> AsyncGenerator[Chunk]:
    for chunk in pieces(activation, data, round):
        yield chunk
