"""The peers of bench/hivemind_fork.py: three hivemind averagers, each in a process of its own, one of which dies."""

from __future__ import annotations

import hashlib
import math
import multiprocessing as mp
import os
import queue
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.hivemind_dht import join_dht, matched

SOCKETS = "/tmp/hivemind-"
"""How the paths of p2pd's sockets begin."""
PEERS, VICTIM = 3, 2
HANGS = 60.0
"""Seconds without a word, from the start or from another peer's, after which a peer is given up."""


@dataclass(frozen=True)
class Survivor:
    """What a peer that was not killed has at the end.

    Attributes:
        said: what its averager reported of the step.
        mean: of its tensor; every peer began with its rank + 1 everywhere.
        digest: SHA-256 of its tensor.
    """

    rank: int
    said: str
    mean: float
    digest: str
    seconds: float


@dataclass(frozen=True)
class Task:
    """What a peer has to do; it dies `dies_after` seconds into the all-reduce if it is the victim (0: nobody dies)."""

    rank: int
    length: int
    dies_after: float
    folder: Path


def average_once(length: int, dies_after: float) -> list[Survivor]:
    """Have three peers average a tensor; what those that were not killed ended with, by rank."""
    context = mp.get_context("spawn")
    gate, results = context.Barrier(PEERS), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        tasks = [Task(rank, length, dies_after, Path(folder)) for rank in range(PEERS)]
        processes = [context.Process(target=_peer, args=(task, gate, results)) for task in tasks]
        for process in processes:
            process.start()
        try:
            alive = PEERS - bool(dies_after)
            survivors = _heard(results, alive)
            for process in processes if len(survivors) == alive else []:
                process.join(timeout=20)
        finally:
            for process in processes:
                _end(process.pid)
            for bound in Path(folder).glob("sockets-*"):  # hivemind leaves some of them behind
                for path in bound.read_text().split():
                    Path(path).unlink(missing_ok=True)
    hung = set(range(alive)) - {survivor.rank for survivor in survivors}
    survivors += [
        Survivor(rank, f"nothing for {HANGS:.0f} s: it hangs", math.nan, "unknown", math.inf) for rank in hung
    ]
    return sorted(survivors, key=lambda survivor: survivor.rank)


def _heard(results: Any, count: int) -> list[Survivor]:
    """What peers report, until all have or nobody does any more."""
    survivors: list[Survivor] = []
    with suppress(queue.Empty):
        while len(survivors) < count:
            survivors.append(results.get(timeout=HANGS))
    return survivors


def _peer(task: Task, gate: Any, results: Any) -> None:
    os.setsid()  # whom the victim kills
    os.environ |= {"OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "ERROR"}
    import torch
    from hivemind import DecentralizedAverager

    dht = join_dht(task.rank, task.folder / "peers", gate)
    averager = DecentralizedAverager(
        [torch.full((task.length,), task.rank + 1.0)], dht, start=True, prefix="fork", target_group_size=PEERS,
        min_group_size=PEERS, min_matchmaking_time=2.0, sender_timeout=3.0, reducer_timeout=6.0, allreduce_timeout=20.0,
    )  # fmt: skip
    gate.wait()
    control = matched(averager)
    dies = task.dies_after and task.rank == VICTIM
    (task.folder / f"sockets-{task.rank}").write_text("\n".join(_sockets()))
    gate.wait()
    began = time.perf_counter()
    control.allow_allreduce()
    if dies:
        threading.Event().wait(task.dies_after)
        os.killpg(0, signal.SIGKILL)
    said = _outcome(control)
    seconds = time.perf_counter() - began
    with averager.get_tensors() as tensors:
        values = tensors[0].numpy()
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        results.put(Survivor(task.rank, said, float(values.mean(dtype="float64")), digest, seconds))
    averager.shutdown()
    dht.shutdown()


def _end(leader: int | None) -> None:
    """End a peer and all that it started: they are a session of their own."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if leader and os.getsid(process.pid) == leader:
                process.kill()


def _outcome(control: Any) -> str:
    try:
        group = control.result(timeout=HANGS / 2)
    except Exception as error:
        return f"failed: {error!r}"
    return f"success, group of {len(group)}"


def _sockets() -> list[str]:
    """What this process and its children have bound, which a killed one cannot remove."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    bound = {str(each.laddr) for process in family for each in process.net_connections("unix")}
    return [path for path in bound if path.startswith(SOCKETS)]
