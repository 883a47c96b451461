"""One attempt at an iteration, at one site: its microbatches, the mean gradient of its stage, and the global norm.

The attempt ends with the gradient for the site's step. Activations are sent and received while the stage computes, in a
thread of its own, one task at a time. Tasks run in the order of the planner's simulator (planning/simulator.py):
earlier waves first, then earlier arrivals, and the site's own new microbatches last. A forward needs a free memory
slot, which its backward frees. If paths return to an earlier stage, microbatches could wait for each other's slots in a
cycle. In that case a new microbatch waits until the one at its position in the previous wave is finished.

A site accepts an activation, or its gradient, if the plan says that it arrives at this site at this hop from this
sender, and if it arrives once and in the expected form (activation_codec.py). Every other tensor is refused with a
reason and changes nothing.

If a tensor has values with which no site can compute, its sender is suspected. So is the sender of the input if a
result here is not finite or too large. Only where nothing came from another site, training has certainly diverged.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pier_node.base.shared import Vector
from pier_node.base.tasks import cancel_and_wait
from pier_node.outer.mean import Update
from pier_node.outer.state import l2_norm
from pier_node.pipeline.activation_codec import LARGEST, BadValues, Formats, TensorFormat, pieces
from pier_node.pipeline.context import Tools
from pier_node.pipeline.iteration_plan import Plan, Task
from pier_node.pipeline.joint import LONGEST, Joint, Overflow, square
from pier_node.pipeline.stage import Stage
from pier_node.rounds.reduce import send
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.carrier import BadMessage, Carrier, Chunk, PeerLost
from pier_proto.v1.peer_pb2 import Activation, Total


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


TAKING = 0.75
"""Patience with a site that takes a tensor, as a multiple of that with one that sends one.

It is less, because those that wait for what this site cannot send meanwhile would suspect this site.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt: the gradient for the step, [parameters of the stage], and the totals."""

    gradient: Vector
    total: Total


class Attempt(Joint[AttemptResult]):
    """This site's part in an attempt.

    Args:
        apart: use the gradient of this site's own microbatches; otherwise the mean over the replicas.
    """

    def __init__(self, tools: Tools, plan: Plan, stage: Stage, apart: bool = False) -> None:
        super().__init__(tools, plan)
        self._stage, self._apart = stage, apart
        self._activations = Activations(tools.carrier, plan, tools.formats)
        self._queue = MicrobatchQueue(plan, self._node, tools.memory)
        self._own = [number for number, way in enumerate(plan.ways) if way[0] == self._node]
        self._targets: dict[int, Tensor] = {}
        self._losses: dict[int, float] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._uplink = asyncio.Lock()
        self._mean = np.zeros(stage.layout.length, np.float32)

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive a stream of this attempt. Raises BadMessage."""
        if first.stage != Chunk.STAGE_ACTIVATION:
            await super().take(sender, first, rest)
            return
        try:
            task = await self._activations.take(sender, first.activation, rest)
        except BadValues as bad:
            self.drop(Suspicion(sender, str(bad)))
            raise
        self._queue.arrive(task)
        self._news.notify()

    async def _work(self) -> AttemptResult:
        tools, stage, now = self._tools, self._stage, asyncio.get_running_loop().time
        began = now()
        await tools.compute(lambda: stage.begin(self.plan.visitors(self._node)))
        while not self._queue.finished:
            task = self._queue.next()
            if task is None:
                await self._await_arrival()
                continue
            await self._do(task)
            self._queue.done(task)
        await self._news.until(lambda: not self._sending)
        self.spans.tasks = now() - began
        tools.pace.over()
        await self._average()
        await tools.faults.reach(self.plan.round, "summed")
        losses = [self._losses[microbatch] for microbatch in self._own]
        worked = self._worked(square=square(self._mean), loss=sum(losses))
        return AttemptResult(self._mean, await self._total(worked))

    async def _do(self, task: Task) -> None:
        microbatch, hop = task
        length, compute, stage = self.plan.length(microbatch), self._tools.compute, self._stage
        await self._tools.faults.reach(self.plan.round, "forward" if hop <= length else "backward")
        began = asyncio.get_running_loop().time()
        result: Tensor | None
        if hop == 0:
            result = await compute(lambda: self._begun(microbatch))
        else:
            tensor = self._activations.pop(task)
            if hop < length:
                result = await compute(lambda: stage.forward(microbatch, tensor))
            elif hop == length:
                result = await self._loss(microbatch, tensor)
            else:
                result = await compute(lambda: stage.backward(microbatch, tensor))
        seconds = asyncio.get_running_loop().time() - began
        self._tools.pace.saw(hop, length, seconds)
        self.spans.computing += seconds
        if result is not None:
            if not _is_moderate(result):
                raise self._overflow(f"microbatch {microbatch} at hop {hop}", [task])
            self._send((microbatch, hop + 1), result)

    def _begun(self, microbatch: int) -> Tensor:
        inputs, self._targets[microbatch] = self._tools.rows(self.plan.message.step, self._own.index(microbatch))
        return self._stage.embed(microbatch, inputs)

    async def _loss(self, microbatch: int, tensor: Tensor) -> Tensor:
        targets = self._targets.pop(microbatch)
        loss, gradient = await self._tools.compute(lambda: self._stage.loss(microbatch, tensor, targets))
        if not math.isfinite(loss):
            raise self._overflow(f"the loss of microbatch {microbatch}", [(microbatch, self.plan.length(microbatch))])
        self._losses[microbatch] = loss
        return gradient

    def _overflow(self, what: str, tasks: Iterable[Task]) -> Overflow:
        """Why this site cannot continue, whose result of these tasks is not finite or too large."""
        return Overflow(what, {self.plan.ways[microbatch][hop - 1] for microbatch, hop in tasks if hop} - {self._node})

    def _send(self, task: Task, tensor: Tensor) -> None:
        """Send a result to the next site while this one computes.

        A result for this site itself is passed on directly.
        """
        microbatch, hop = task
        if self.plan.ways[microbatch][hop] == self._node:
            self._activations.put(task, tensor)
            self._queue.arrive(task)
            return
        sending = asyncio.create_task(self._push(task, tensor))
        self._sending.add(sending)
        sending.add_done_callback(self._was_sent)

    async def _push(self, task: Task, tensor: Tensor) -> None:
        """Send tensors one after the other, as the planner expects: sent together on one line, each would be late."""
        data, silence = await self._activations.encode(task, tensor), self._tools.silence
        async with self._uplink:
            began = asyncio.get_running_loop().time()
            try:
                await self._activations.send(task, data, TAKING * silence.seconds())
            except Suspicion as suspicion:
                if suspicion.mute:
                    silence.late()
                raise
            self._tools.pace.sent(self.plan.ways[task[0]][task[1]], asyncio.get_running_loop().time() - began)

    def _was_sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled() and (error := sending.exception()):
            if not isinstance(error, Suspicion):
                log.error("a tensor could not be sent", exc_info=error)
                error = Suspicion(NOBODY, f"a tensor could not be sent: {error}")
            self.drop(error)
        self._news.notify()

    async def _await_arrival(self) -> None:
        began, silence = asyncio.get_running_loop().time(), self._tools.silence.seconds()
        await self._news.wait(silence)
        waited = asyncio.get_running_loop().time() - began
        if waited >= silence:
            self._tools.silence.late()
            microbatch, hop = min(self._queue.awaited, default=(0, 1))
            raise Suspicion(self.plan.ways[microbatch][hop - 1], f"sent nothing for {silence:.0f} s")
        self._tools.silence.saw(waited)

    async def _average(self) -> None:
        """Compute the mean gradient of the stage, or of this site; nothing to do for a stage without microbatches."""
        gradient = torch.from_numpy(np.zeros_like(self._mean))
        await self._tools.compute(lambda: self._stage.mean_gradient(gradient))
        if not l2_norm(gradient.numpy()) <= LONGEST:
            raise self._overflow("the gradient", self.plan.tasks(self._node))
        if self._apart:
            self._mean[:] = gradient.numpy()
        elif self._stage.stage in self.plan.visited:
            faults = self._tools.faults.within("averaging")
            own = Update(gradient.numpy(), self.plan.weights[self._node])
            await self._reduce(self.plan.weights, own, self._mean, faults=faults)
        self._open()

    async def _close(self) -> None:
        self._activations.close()
        await super()._close()
        await cancel_and_wait(*self._sending)


def _is_moderate(tensor: Tensor) -> bool:
    """Whether no value is NaN or larger than a stage may send."""
    low, high = tensor.aminmax()
    return bool(low >= -LARGEST) and bool(high <= LARGEST)
