"""The peers of bench/outer_sync.py: each averages a vector with the others, `reps` times, in its own process.

Every peer function is called as peer(rank, count, length, reps, gate, report): `gate` is a barrier of all peers, passed
right before each measured exchange; `report` takes the seconds of each.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.hivemind_dht import join_dht
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

    def check(self, mean: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Make sure that it was averaged."""
        wanted = (self.count + 1) / 2
        assert mean[0] == wanted, mean[:3]
        assert mean[-1] == wanted
        assert abs(float(mean.mean(dtype=np.float64)) - wanted) < 1e-4


Report = Callable[[float], None]


def gloo(task: Task, gate: Gate, report: Report) -> None:
    """torch.distributed.all_reduce over gloo: C++, no TLS, no fault tolerance."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(task.host(0), task.port, task.count, is_master=task.rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.count)
    for _ in range(task.reps):
        vector = torch.from_numpy(task.vector())
        gate.wait()
        began = time.perf_counter()
        dist.all_reduce(vector)
        vector /= task.count
        report(time.perf_counter() - began)
        task.check(vector.numpy())
    gate.wait()
    dist.destroy_process_group()


def hivemind(task: Task, gate: Gate, report: Report) -> None:
    """hivemind's DecentralizedAverager. Its matchmaking is not measured: the clock starts when the group stands."""
    import torch
    from hivemind import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    dht = join_dht(task.rank, task.folder / "hivemind-peers", gate)
    averager = DecentralizedAverager(
        [torch.zeros(task.length)], dht, start=True, prefix="bench", target_group_size=task.count,
        min_group_size=task.count, min_matchmaking_time=2.0, allreduce_timeout=120.0,
    )  # fmt: skip
    for _ in range(task.reps):
        with averager.get_tensors() as tensors:
            tensors[0][:] = torch.from_numpy(task.vector())
        gate.wait()
        control = averager.step(wait=False, require_trigger=True, timeout=120)
        while control.stage != AveragingStage.AWAITING_TRIGGER:
            time.sleep(0.01)
        gate.wait()
        began = time.perf_counter()
        control.allow_allreduce()
        control.result()
        report(time.perf_counter() - began)
        with averager.get_tensors() as tensors:
            task.check(tensors[0].numpy())
    gate.wait()
    averager.shutdown()
    dht.shutdown()


def pier(task: Task, gate: Gate, report: Report) -> None:
    """Pier's reduce-scatter and all-gather over gRPC, without TLS."""
    asyncio.run(_pier(task, gate, report, "grpc", secure=False))


def pier_tls(task: Task, gate: Gate, report: Report) -> None:
    """The same over mutual TLS, as sites use it."""
    asyncio.run(_pier(task, gate, report, "grpc", secure=True))


def pier_libp2p(task: Task, gate: Gate, report: Report) -> None:
    """The same over libp2p, through hivemind's p2pd: TLS too."""
    asyncio.run(_pier(task, gate, report, "hivemind", secure=True))


async def _pier(task: Task, gate: Gate, report: Report, transport: Transport, secure: bool) -> None:
    from pier_node.identity.certificates import credentials
    from pier_node.identity.node import Identity, Token
    from pier_node.outer.codec.plain import Plain
    from pier_node.outer.mean import split
    from pier_node.outer.update import Update
    from pier_node.rounds.plan import Plan
    from pier_node.rounds.reduce import Reduction
    from pier_proto.v1.peer_pb2 import Ballot, Chunk, Share

    run = hashlib.sha256(b"bench").digest()
    identity = Identity.load_or_create(task.folder / f"peer{task.rank}")
    own = credentials(identity, Token(bytes(32), run[:16])) if secure else None
    carrier = make_carrier(transport, identity.node, run, own)
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
    vector, mean = task.vector(), np.zeros(task.length, np.float32)
    for number in range(1, task.reps + 1):
        plan = Plan(number, Ballot(number=1, leader=min(nodes)), shares, norm_limit=1e9, silence=60.0)
        reduction = Reduction(carrier, plan, Update(vector, 1), mean, Plain())
        await asyncio.to_thread(gate.wait)
        began = time.perf_counter()
        reductions[number].set_result(reduction)
        await reduction.run()
        report(time.perf_counter() - began)
        task.check(mean)
    await asyncio.to_thread(gate.wait)
    await carrier.stop()


PEERS: dict[str, Callable[[Task, Gate, Report], None]] = {
    "pier": pier,
    "pier, TLS": pier_tls,
    "pier, libp2p": pier_libp2p,
    "hivemind": hivemind,
    "gloo": gloo,
}


def main(name: str, task: Task, gate: Gate, results: Any) -> None:
    """Run a peer; called in its own process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    times: list[float] = []
    try:
        PEERS[name](task, gate, times.append)
    except Exception as error:
        results.put((f"{name}, peer {task.rank}: {error!r}", []))
        raise
    results.put(("", times))
