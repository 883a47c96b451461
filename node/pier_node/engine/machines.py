"""The ranks of a site's program, on one machine or several, and how each comes to its part of the weights.

The daemon shares memory with the ranks of its own machine. The parts of the others travel over the process group,
between rank 0, which reads and writes the shared vectors for them, and their parameters: in bounded pieces.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector, attach

if TYPE_CHECKING:  # it loads DTensor, which Pier's own trainer does without
    from pier_node.engine.parameters import Vectors

HOST_VARIABLE = "PIER_HOST"
"""Environment variable: ranks in which it differs share no memory, wherever they run."""
PATIENCE = timedelta(days=30)
"""How long ranks wait for each other: as long as an outer round may wait for other sites."""
PIECE = 1 << 22
"""Most elements that travel at a time, unless a single row has more."""

T = TypeVar("T")


class Ranks:
    """The processes that train the model of this site; they talk over a gloo group of their own.

    Attributes:
        count: how many there are.
        own: this one's number.
        here: this one shares memory with rank 0 and the daemon.
        away: those that do not.
    """

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.count, self.own = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > self.count:
            raise PierError(
                f"this is one of {launched} ranks, which have not joined each other yet",
                "Call torch.distributed.init_process_group() before pier.join.",
            )
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.count > 1 else None
        hosts = self.gather(_host())
        self.here = hosts[self.own] == hosts[0]
        self.away = [rank for rank in range(self.count) if hosts[rank] != hosts[0]]

    def share(self, line: bytes) -> bytes:
        """What rank 0 has, at every rank."""
        lines = [line]
        if self.count > 1:
            dist.broadcast_object_list(lines, src=0, group=self._group)
        return lines[0]

    def sums(self, *numbers: float) -> list[float]:
        """Sums over the ranks."""
        if self.count == 1:
            return [*numbers]
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, group=self._group)
        return [float(value) for value in values]

    def gather(self, own: T) -> list[T]:
        """What each rank has, at every rank."""
        everybody: list[T] = [own] * self.count
        if self.count > 1:
            dist.all_gather_object(everybody, own, group=self._group)
        return everybody

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to another rank, in pieces."""
        for piece in pieces(tensor):
            dist.send(piece.to("cpu", torch.float32).contiguous(), rank, group=self._group)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor with what another rank sends."""
        for piece in pieces(tensor):
            buffer = torch.empty(piece.shape)
            dist.recv(buffer, rank, group=self._group)
            piece.copy_(buffer)

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier(group=self._group)


class Weights:
    """The weights of a model whose ranks may be on several machines: in and out of the daemon's shared vectors."""

    def __init__(self, vectors: Vectors, ranks: Ranks) -> None:
        self._vectors, self._ranks = vectors, ranks
        self._parts = ranks.gather(vectors.parts) if ranks.away else []

    def load(self, path: str) -> None:
        """Take this rank's part from a shared vector of the daemon."""
        self.take(self.mapped(path))

    def mapped(self, path: str) -> Vector | None:
        """A shared vector of the daemon, which stays while it is mapped; None: this rank cannot map it."""
        return attach(path, self._vectors.length) if self._ranks.here else None

    def take(self, weights: Vector | None) -> None:
        """Take this rank's part from what it has mapped."""
        vectors, ranks = self._vectors, self._ranks
        if weights is not None:
            vectors.take(weights)
        if ranks.own == 0 and weights is not None:
            for rank in ranks.away:
                for _, place in vectors.places(weights, self._parts[rank]):
                    ranks.send(place, rank)
        if not ranks.here:
            with torch.no_grad():
                for part in vectors.parts:
                    ranks.receive(vectors.local(part), 0)

    def store(self, path: str) -> None:
        """Write this rank's part to a shared vector of the daemon; return when all ranks have."""
        vectors, ranks = self._vectors, self._ranks
        if ranks.here:
            vectors.store(path)
        if ranks.own == 0 and ranks.away:
            weights = attach(path, vectors.length)
            for rank in ranks.away:
                for part, place in vectors.places(weights, self._parts[rank]):
                    if part.first:
                        ranks.receive(place, rank)
        if not ranks.here:
            for part in vectors.parts:
                if part.first:
                    ranks.send(vectors.local(part), 0)
        ranks.meet()


def _host() -> str:
    """A name that is the same where processes can map each other's memory by /proc."""
    if HOST_VARIABLE in os.environ:
        return os.environ[HOST_VARIABLE]
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()} {machine} {os.readlink('/proc/self/ns/pid')}"


def peak_bytes(device: torch.device) -> int:
    """Peak device memory of this process in bytes; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of a tensor, along its first dimension, of at most PIECE elements or one row."""
    if tensor.numel():
        whole = tensor.view(1) if tensor.dim() == 0 else tensor
        rows = max(1, PIECE // whole[0].numel())
        for first in range(0, len(whole), rows):
            yield whole[first : first + rows]
