"""The peers of bench/outer_sync.py: each averages a vector with the others, `reps` times, in its own process.

Every peer function is called as peer(task, gate, report): `gate` is a barrier of all peers, passed right before each
measured exchange; `report` receives what each exchange cost this peer. Processor seconds, user and system, are those
of the peer's process, all its threads, and the processes that it has started.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from bench.hivemind_dht import join_dht, matched
from pier_node.wire.transport import Transport, make_carrier

HOST = "127.0.0.1"


class Gate(Protocol):
    """multiprocessing's Barrier."""

    def wait(self) -> int:
        """Return when all peers are here."""


@dataclass(frozen=True)
class Task:
    """What a peer has to do."""

    rank: int
    count: int
    length: int
    reps: int
    port: int
    folder: Path
    hosts: tuple[str, ...] = ()

    def host(self, rank: int) -> str:
        """Where a peer listens."""
        return self.hosts[rank] if self.hosts else HOST

    def vector(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """This peer's vector: constant, so that the mean is easy to check."""
        return np.full(self.length, self.rank + 1, np.float32)

    def check(self, mean: np.ndarray[Any, np.dtype[np.float32]], tolerance: float = 0.0) -> None:
        """Make sure that it was averaged."""
        wanted = (self.count + 1) / 2
        assert abs(mean[0] - wanted) <= tolerance, mean[:3]
        assert abs(mean[-1] - wanted) <= tolerance, mean[-3:]
        assert abs(float(mean.mean(dtype=np.float64)) - wanted) < max(1e-4, tolerance)


@dataclass(frozen=True)
class Cost:
    """Seconds that an exchange took a peer, by the clock and of the processors."""

    seconds: float
    processor: float


Report = Callable[[Cost], None]


class Meter:
    """Reports what each exchange costs this process and the processes that it has started so far."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._helpers = psutil.Process().children(recursive=True)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Measure a block."""
        helpers, processor, began = self._of_helpers(), time.process_time(), time.perf_counter()
        yield
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        self._report(Cost(seconds, processor + self._of_helpers() - helpers))

    def _of_helpers(self) -> float:
        times = [it.cpu_times() for it in self._helpers]  # the kernel tells them in steps of 10 ms
        return sum(it.user + it.system for it in times)


def gloo(task: Task, gate: Gate, report: Report) -> None:
    """torch.distributed.all_reduce over gloo: C++, no TLS, no fault tolerance."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(task.host(0), task.port, task.count, is_master=task.rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.count)
    meter = Meter(report)
    for _ in range(task.reps):
        vector = torch.from_numpy(task.vector())
        gate.wait()
        with meter.exchange():
            dist.all_reduce(vector)
            vector /= task.count
        task.check(vector.numpy())
    gate.wait()
    dist.destroy_process_group()


def hivemind(task: Task, gate: Gate, report: Report) -> None:
    """hivemind's DecentralizedAverager. Its matchmaking is not measured: the clock starts when the group stands."""
    import torch
    from hivemind import DecentralizedAverager

    dht = join_dht(task.rank, task.folder / "hivemind-peers", gate)
    averager = DecentralizedAverager(
        [torch.zeros(task.length)], dht, start=True, prefix="bench", target_group_size=task.count,
        min_group_size=task.count, min_matchmaking_time=2.0, allreduce_timeout=120.0,
    )  # fmt: skip
    meter = Meter(report)
    for _ in range(task.reps):
        with averager.get_tensors() as tensors:
            tensors[0][:] = torch.from_numpy(task.vector())
        gate.wait()
        control = matched(averager)
        gate.wait()
        with meter.exchange():
            control.allow_allreduce()
            control.result()
        with averager.get_tensors() as tensors:
            task.check(tensors[0].numpy())
    gate.wait()
    averager.shutdown()
    dht.shutdown()


@dataclass(frozen=True)
class Pier:
    """Pier's reduce-scatter and all-gather, over a carrier, with a codec."""

    transport: Transport = "grpc"
    secure: bool = True
    codec: str = "none"

    def __call__(self, task: Task, gate: Gate, report: Report) -> None:
        """Be a peer."""
        asyncio.run(_pier(self, task, gate, report))


async def _pier(system: Pier, task: Task, gate: Gate, report: Report) -> None:
    from pier_node.identity.certificates import credentials
    from pier_node.identity.node import Identity, Token
    from pier_node.outer.codec import codec as codec_named
    from pier_node.outer.mean import Update, split
    from pier_node.rounds.exchange_plan import Plan
    from pier_node.rounds.reduce import Reduction
    from pier_node.wire.carrier import Chunk
    from pier_proto.v1.peer_pb2 import Ballot, Share

    run = hashlib.sha256(b"bench").digest()
    identity = Identity.load_or_create(task.folder / f"peer{task.rank}")
    own = credentials(identity, Token(bytes(32), run[:16])) if system.secure else None
    carrier = make_carrier(system.transport, identity.node, run, own)
    reductions: dict[int, asyncio.Future[Reduction]] = {
        number: asyncio.get_running_loop().create_future() for number in range(1, task.reps + 1)
    }

    async def take(sender: str, chunks: AsyncIterator[Chunk]) -> None:
        first = await anext(chunks)
        await (await reductions[first.round]).take(sender, first, chunks)

    carrier.serve_push(take)
    choice = await carrier.listen(f"{task.host(task.rank)}:{task.port + task.rank}", None, [])
    (task.folder / f"node{task.rank}").write_text(f"{identity.node} {choice.address}")
    await asyncio.to_thread(gate.wait)
    known = [(task.folder / f"node{rank}").read_text().split() for rank in range(task.count)]
    nodes = [node for node, _ in known]
    for node, address in known:
        if node != identity.node:
            carrier.introduce(node, address)
    shards = zip(sorted(nodes), split(task.length, [0.0] * task.count), strict=True)
    shares = [Share(node=node, tokens=1, norm=1e9, offset=offset, length=length) for node, (offset, length) in shards]
    codec, vector, mean = codec_named(system.codec), task.vector(), np.zeros(task.length, np.float32)
    update = Update(vector, 1, np.zeros_like(vector) if codec.lossy else None)
    meter = Meter(report)
    for number in range(1, task.reps + 1):
        plan = Plan(number, Ballot(number=1, leader=min(nodes)), shares, norm_limit=1e9, silence=60.0)
        reduction = Reduction(carrier, plan, update, mean, codec)
        await asyncio.to_thread(gate.wait)
        with meter.exchange():
            reductions[number].set_result(reduction)
            await reduction.run()
        task.check(mean, 0.1 * task.count if codec.lossy else 0)
    await asyncio.to_thread(gate.wait)
    await carrier.stop()


PEERS: dict[str, Callable[[Task, Gate, Report], None]] = {
    "pier": Pier(secure=False),
    "pier, TLS": Pier(),
    "pier, TLS, int4": Pier(codec="int4"),
    "pier, libp2p": Pier("hivemind"),
    "hivemind": hivemind,
    "gloo": gloo,
}


def main(name: str, task: Task, gate: Gate, results: Any) -> None:
    """Run a peer; called in its own process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    costs: list[Cost] = []
    try:
        PEERS[name](task, gate, costs.append)
    except Exception as error:
        results.put((f"{name}, peer {task.rank}: {error!r}", []))
        raise
    results.put(("", costs))
