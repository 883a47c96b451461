"""One attempt at an iteration, at one site: its microbatches, the mean gradient of its stage, and the global norm.

It ends in the gradient with which the site could step. Activations come and go while the stage computes, in a thread of
its own, one task at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pier.v1.peer_pb2 import Chunk, Total
from pier_node.outer.suspicion import NOBODY, Suspicion
from pier_node.pipeline.desk import Desk
from pier_node.pipeline.itinerary import Plan, Task
from pier_node.pipeline.joint import Diverged, Joint
from pier_node.pipeline.passages import Passages
from pier_node.pipeline.replicas import square
from pier_node.pipeline.stage import Stage
from pier_node.pipeline.tools import Tools
from pier_node.shared import Vector

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worth:
    """What an attempt has worked out: the gradient to step with, [parameters of the stage], and the totals."""

    gradient: Vector
    total: Total


class Attempt(Joint[Worth]):
    """This site's part in an attempt.

    Args:
        apart: the gradient is that of the microbatches that came here; else it is the mean over the replicas.
    """

    def __init__(self, tools: Tools, plan: Plan, stage: Stage, apart: bool = False) -> None:
        super().__init__(tools, plan)
        self._stage, self._apart = stage, apart
        self._passages = Passages(tools.carrier, plan, tools.shape, stage.dtype)
        self._desk = Desk(plan, self._node, tools.memory)
        self._own = [number for number, way in enumerate(plan.ways) if way[0] == self._node]
        self._targets: dict[int, Tensor] = {}
        self._losses: dict[int, float] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._uplink = asyncio.Lock()
        self._mean = np.zeros(stage.layout.length, np.float32)

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Take a stream of this attempt. Raises BadMessage."""
        if first.stage != Chunk.STAGE_PASSAGE:
            await super().take(sender, first, rest)
            return
        task = await self._passages.take(sender, first.passage, rest)
        self._desk.arrive(task)
        self._news.notify()

    async def _work(self) -> Worth:
        tools, stage, now = self._tools, self._stage, asyncio.get_running_loop().time
        began = now()
        await tools.compute(lambda: stage.begin(self.plan.visitors(self._node)))
        while not self._desk.finished:
            task = self._desk.next()
            if task is None:
                await self._await_arrival()
                continue
            await self._do(task)
            self._desk.done(task)
        await self._news.until(lambda: not self._sending)
        self.spans.tasks = now() - began
        tools.pace.over()
        await self._average()
        await tools.faults.reach(self.plan.round, "summed")
        losses = [self._losses[microbatch] for microbatch in self._own]
        worked = self._worked(square=square(self._mean), loss=sum(losses))
        if not np.isfinite(worked.square):
            raise Diverged("the gradient")
        return Worth(self._mean, await self._total(worked))

    async def _do(self, task: Task) -> None:
        microbatch, hop = task
        length, compute, stage = self.plan.length(microbatch), self._tools.compute, self._stage
        await self._tools.faults.reach(self.plan.round, "forward" if hop <= length else "backward")
        began = asyncio.get_running_loop().time()
        result: Tensor | None
        if hop == 0:
            result = await compute(lambda: self._begun(microbatch))
        else:
            tensor = self._passages.pop(task)
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
            if not bool(torch.isfinite(result).all()):
                raise Diverged(f"microbatch {microbatch} at hop {hop}")
            self._send((microbatch, hop + 1), result)

    def _begun(self, microbatch: int) -> Tensor:
        inputs, self._targets[microbatch] = self._tools.rows(self.plan.message.step, self._own.index(microbatch))
        return self._stage.embed(microbatch, inputs)

    async def _loss(self, microbatch: int, tensor: Tensor) -> Tensor:
        targets = self._targets.pop(microbatch)
        loss, gradient = await self._tools.compute(lambda: self._stage.loss(microbatch, tensor, targets))
        self._losses[microbatch] = loss
        return gradient

    def _send(self, task: Task, tensor: Tensor) -> None:
        """On to the next site, while this one computes; from the last stage's loss back to itself there is no way."""
        microbatch, hop = task
        if self.plan.ways[microbatch][hop] == self._node:
            self._passages.put(task, tensor)
            self._desk.arrive(task)
            return
        sending = asyncio.create_task(self._push(task, tensor))
        self._sending.add(sending)
        sending.add_done_callback(self._was_sent)

    async def _push(self, task: Task, tensor: Tensor) -> None:
        """One after the other, as the planner expects: together on one line, each would be late."""
        async with self._uplink:
            began = asyncio.get_running_loop().time()
            await self._passages.send(task, tensor)
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
            microbatch, hop = min(self._desk.awaited, default=(0, 1))
            raise Suspicion(self.plan.ways[microbatch][hop - 1], f"sent nothing for {silence:.0f} s")
        self._tools.silence.saw(waited)

    async def _average(self) -> None:
        """The mean gradient of the stage, or of this site; nothing to do where no microbatch came to it."""
        gradient = torch.from_numpy(np.zeros_like(self._mean))
        await self._tools.compute(lambda: self._stage.mean_gradient(gradient))
        if self._apart:
            self._mean[:] = gradient.numpy()
        elif self._stage.stage in self.plan.visited:
            faults = self._tools.faults.within("averaging")
            await self._reduce(self.plan.weights, gradient.numpy(), self._mean, faults)
        self._open()

    async def _close(self, *tasks: asyncio.Task[Any]) -> None:
        self._passages.closed = True
        await super()._close(*tasks, *self._sending)
