"""The microbatches of an iteration at one site: in which order it computes them, and where each goes next.

Tasks run in the order of the planner's simulator (pipeline/planning/simulator.py): earlier waves first, then earlier
arrivals, and the site's own new microbatches last. A forward needs a free memory slot, which its backward frees. If
paths return to an earlier stage, microbatches could wait for each other's slots in a cycle. In that case a new
microbatch waits until the one at its position in the previous wave is finished.

A site accepts an activation, or its gradient, if the plan says that it arrives at this site at this hop from this
sender, if it arrives once and in the expected shape and dtype, and if it is finite. Every other tensor is refused with
a reason and changes nothing. Tensors travel as little-endian fp32 or bf16.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import torch
from torch import Tensor

from pier_node.pipeline.iteration_plan import Plan, Task
from pier_node.rounds.reduce import send
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Activation, Chunk


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


DTYPES = {Activation.DTYPE_FP32: torch.float32, Activation.DTYPE_BF16: torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def pieces(activation: Activation, tensor: Tensor, round: int) -> Iterator[Chunk]:
    """Split a tensor into a stream: an empty chunk that identifies the tensor, then its values.

    `offset` counts elements.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    size, step = tensor.element_size(), CHUNK_BYTES
    yield Chunk(round=round, stage=Chunk.STAGE_ACTIVATION, activation=activation)
    for start in range(0, len(flat), step):
        data = flat[start : start + step].tobytes()
        yield Chunk(round=round, stage=Chunk.STAGE_ACTIVATION, offset=start // size, data=data)


def activation_of(attempt: bytes, microbatch: int, hop: int, tensor: Tensor) -> Activation:
    """The description that identifies a tensor in transit."""
    shape, dtype = [*tensor.shape], CODES[tensor.dtype]
    return Activation(attempt=attempt, microbatch=microbatch, hop=hop, shape=shape, dtype=dtype)


class Arriving:
    """A tensor whose chunks arrive one after the other.

    Raises BadMessage, which says what is wrong with a chunk or with the whole tensor.
    """

    def __init__(self, activation: Activation, shape: Sequence[int], dtype: torch.dtype) -> None:
        if [*activation.shape] != [*shape]:
            raise BadMessage(f"a tensor of shape {[*activation.shape]}, expected {[*shape]}")
        if DTYPES.get(activation.dtype) is not dtype:
            raise BadMessage(f"a tensor of {Activation.Dtype.Name(activation.dtype)}, expected {dtype}")
        self._tensor = torch.empty(*shape, dtype=dtype)
        self._bytes = self._tensor.view(-1).view(torch.uint8).numpy()
        self._size = self._tensor.element_size()
        self._arrived = 0

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk. Chunks must be complete, in order and without repeats."""
        start, end = self._arrived, self._arrived + len(chunk.data)
        expected = min(CHUNK_BYTES, len(self._bytes) - start)
        if chunk.offset * self._size != start or len(chunk.data) != expected or not expected:
            raise BadMessage(f"a chunk at {chunk.offset} of {len(chunk.data)} bytes, expected {expected} at {start}")
        self._bytes[start:end] = memoryview(chunk.data)
        self._arrived = end

    def whole(self) -> Tensor:
        """The complete tensor."""
        if self._arrived < len(self._bytes):
            raise BadMessage(f"a stream that ends after {self._arrived} of {len(self._bytes)} bytes")
        if not bool(torch.isfinite(self._tensor).all()):
            raise BadMessage("a tensor that is not finite")
        return self._tensor


class Activations:
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
        """Store the input of a task that this site produced itself."""
        self._taking.add(task)
        self._here[task] = tensor

    def pop(self, task: Task) -> Tensor:
        """Remove and return the input of a task."""
        return self._here.pop(task)

    async def send(self, task: Task, tensor: Tensor) -> None:
        """Send the input of a task to the site that does the task. Raises Suspicion."""
        microbatch, hop = task
        node = self._plan.ways[microbatch][hop]
        chunks = _stream(activation_of(self._plan.name, microbatch, hop, tensor), tensor, self._plan.round)
        await send(self._carrier, node, chunks)

    async def take(self, sender: str, activation: Activation, rest: AsyncIterator[Chunk]) -> Task:
        """Receive a tensor that a site streams. Raises BadMessage, PeerLost."""
        task = self._expected(sender, activation)
        arriving = Arriving(activation, self._shape, self._dtype)
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

    def _expected(self, sender: str, activation: Activation) -> Task:
        """The task that a tensor is for. Raises BadMessage: it is for no task of this site, or not from this sender."""
        microbatch, hop = activation.microbatch, activation.hop
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


async def _stream(activation: Activation, tensor: Tensor, round: int) -> AsyncGenerator[Chunk]:
    for chunk in pieces(activation, tensor, round):
        yield chunk
