"""A site's workers: processes, one per device, that do the inner steps their daemon requests; and their launcher.

The daemon runs the launcher as `python -m pier_node.trainer.worker`. It loads PyTorch once and forks the workers, which
can then start and restart without loading it. When one worker dies, all of them are restarted. The launcher ends when
all workers end normally, when they have died too often, or with its daemon.

The workers of a site find each other on the loopback interface, through a file. Each has a socket to the daemon. When
the daemon is gone, the worker ends at once, even in the middle of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.base.processes import call_process, die_with_parent, spin_little
from pier_node.base.shared import attach
from pier_node.config.run import from_canonical
from pier_node.engine.messages import (
    LINE_LIMIT,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Hello,
    Job,
    Message,
    Progress,
    Publishing,
    Rate,
    Rated,
    Setup,
    Tokenizing,
    decode,
    encode,
)
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import Batch, Corpus, Windows, open_corpus, share
from pier_node.trainer.data.tokens import check_vocab
from pier_node.trainer.replica import Replica

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A worker that waits this long for another gives up, and the site's workers are restarted."""


@dataclass(frozen=True)
class Place:
    """Which worker this is: rank of world, in the group's restart number `attempt`."""

    rank: int
    world: int
    attempt: int

    def join(self, device: torch.device, socket: str) -> None:
        """Create the site's process group, stored in a file next to the daemon's socket; nothing for one worker."""
        if self.world == 1:
            return
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{socket}.group-{self.attempt}",
            rank=self.rank,
            world_size=self.world,
            timeout=COLLECTIVE_TIMEOUT,
        )


class Link:
    """A connection to the daemon. The process ends with code 0 as soon as the daemon closes its end.

    Args:
        path: the daemon's Unix socket.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            _leave()
        self._received: queue.SimpleQueue[Message | PierError] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to the daemon."""
        try:
            self._socket.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            _leave()

    def receive(self) -> Message:
        """The daemon's next message; waits for it as long as the daemon lives.

        Raises PierError: it is not a message.
        """
        received = self._received.get()
        if isinstance(received, PierError):
            raise received
        return received

    def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError), self._socket.makefile("rb") as lines:
            while line := lines.readline(LINE_LIMIT):
                self._received.put(_decoded(line))
        _leave()


def _decoded(line: bytes) -> Message | PierError:
    try:
        return decode(line)
    except PierError as error:
        return error


def _leave() -> None:
    # The main thread may be inside a kernel or a collective for seconds: only this ends it immediately.
    os._exit(0)


REPORT_INTERVAL = 0.2
"""Minimum seconds between progress reports: each makes the device wait until its queue is empty."""


class Worker:
    """The model, the data and the shared vectors of one worker, and its requests.

    Args:
        link: to the daemon.
        place: among the workers of the site, which have joined.
        device: its own.
        setup: the daemon's first message.
        corpus: the site's corpus, which `setup` names.
    """

    def __init__(self, link: Link, place: Place, device: torch.device, setup: Setup, corpus: Corpus) -> None:
        config = from_canonical(setup.config)
        self._link, self._place, self._device, self._inner = link, place, device, config.inner
        self._windows = Windows(corpus, config.model.context, config.run.seed, setup.node)
        self._replica = Replica(config, device, place.world)
        self._length = self._replica.layout.length
        self._outbox, self._adam_m, self._adam_v = map(self._attach, (setup.outbox, setup.adam_m, setup.adam_v))

    def obey(self, message: Message) -> None:
        """Execute a request of the daemon."""
        match message:
            case Job():
                self._work(message)
            case Evaluate():
                self._evaluate(message)
            case Rate():
                self._rate(message)
            case _:
                raise PierError(f"a worker cannot obey {message}")

    def _work(self, job: Job) -> None:
        started, reported = time.monotonic(), 0.0
        self._load(job)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index in range(job.steps):
            loss = self._step(job, job.first_step + index)
            total += loss
            seconds = time.monotonic() - started
            if self._place.rank == 0 and (index == 0 or seconds - reported > REPORT_INTERVAL):
                reported = seconds
                self._link.send(Progress(job.first_step + index, loss.item(), self._tokens(job, index + 1), seconds))
        if self._place.rank == 0:
            self._publish(job)
            peak, seconds = devices.peak_bytes(self._device), time.monotonic() - started
            tokens, loss_mean = self._tokens(job, job.steps), total.item() / job.steps
            self._link.send(Done(job.id, tokens, loss_mean, self._replica.adam_step, seconds, peak))

    def _load(self, job: Job) -> None:
        self._replica.load_weights(self._attach(job.load))
        if job.load_adam:
            self._replica.load_moments(self._adam_m, self._adam_v, job.adam_step)

    def _step(self, job: Job, step: int) -> Tensor:
        rows = self._rows(step, job.sequences)
        if job.payload == "gradient":
            return self._replica.gradient(rows, job.sequences)
        return self._replica.train(step, rows, job.sequences)

    def _publish(self, job: Job) -> None:
        self._link.send(Publishing(job.id))
        if job.payload == "gradient":
            self._replica.store_gradient(self._outbox)
            return
        self._replica.store_weights(self._outbox)
        self._replica.store_moments(self._adam_m, self._adam_v)

    def _evaluate(self, request: Evaluate) -> None:
        inner, place = self._inner, self._place
        own = self._windows.validation(inner.eval_batches, inner.batch_size, self._at_once, place.rank, place.world)
        loss = self._replica.evaluate(self._attach(request.weights), own)
        if place.rank == 0:
            self._link.send(Evaluated(request.id, loss))

    def _rate(self, request: Rate) -> None:
        if self._place.rank != 0:
            return
        losses = self._replica.rate(self._attach(request.weights), np.load(request.rows), self._at_once)
        self._link.send(Rated(request.id, losses.tolist()))

    def _rows(self, step: int, sequences: int) -> Batch:
        world = self._place.world
        if sequences < world:
            raise PierError(
                f"a batch of {sequences} sequence(s) cannot be dealt to the {world} workers of this site",
                f"Raise inner.batch_size to {world} or more, or start this node with --workers {sequences}.",
            )
        return self._windows.rows(step, *share(sequences, self._place.rank, world))

    @property
    def _at_once(self) -> int:
        """Maximum number of sequences that this worker computes together in a step: its memory suffices for them."""
        own = max(1, self._inner.batch_size // self._place.world)
        return min(own, self._inner.micro_batch or own)

    def _tokens(self, job: Job, steps: int) -> int:
        return steps * job.sequences * self._replica.context

    def _attach(self, path: str) -> Tensor:
        return torch.from_numpy(attach(path, self._length))


def open_data(setup: Setup, link: Link) -> Corpus:
    """The tokens of the site. One of its workers creates them if necessary, and reports progress to the daemon."""
    config = from_canonical(setup.config)

    def told(read: int, size: int) -> None:
        link.send(Tokenizing(read, size))

    corpus = open_corpus(config.data, setup.slot, setup.slots, setup.data_path, Path(setup.cache), told)
    check_vocab(corpus.vocab_size, config.model.vocab_size)
    return corpus


def serve(socket: str, place: Place) -> None:
    """Serve the daemon that listens at a socket until it is gone, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides about Ctrl+C
    link = Link(socket)
    try:
        _serve(link, place, socket)
    except PierError as error:
        # A restart would meet the same error. The daemon ends this process after reporting it.
        link.send(Failed(error.problem, error.remedy))
        while True:
            link.receive()


def _serve(link: Link, place: Place, socket: str) -> None:
    devices.share_cores(place.world)
    device = devices.pick(place.rank)
    link.send(Hello(place.rank, place.world, place.attempt, devices.describe(device)))
    setup = link.receive()
    if not isinstance(setup, Setup):
        raise PierError(f"a worker is set up before anything else, but the daemon sent {setup}")
    # Before the workers join: after that they give each other up after COLLECTIVE_TIMEOUT.
    corpus = open_data(setup, link)
    place.join(device, socket)
    worker = Worker(link, place, device, setup, corpus)
    while True:
        worker.obey(link.receive())


WORKER = "pier-worker"
"""Name of a worker in `top` and `ps -o comm`."""

_FORK = get_context("fork")


def main() -> None:
    """Run the workers. Exit code 1: they died too often."""
    die_with_parent()
    arguments = _arguments()
    _set_environment()
    world = arguments.workers or _count()
    for attempt in range(arguments.max_restarts + 1):
        team = [_FORK.Process(target=_work, args=(arguments.socket, Place(i, world, attempt))) for i in range(world)]
        if _in_peace(team):
            return
    sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="where the daemon listens")
    parser.add_argument("--workers", type=int, default=0, help="0: one for each device")
    parser.add_argument("--max-restarts", type=int, default=0)
    return parser.parse_args()


def _set_environment() -> None:
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    spin_little()


def _count() -> int:
    with _FORK.Pool(1) as pool:  # not here: a driver that is loaded before a fork does not work after it
        return pool.apply(devices.count)


def _work(socket: str, place: Place) -> None:
    die_with_parent()
    call_process(WORKER)
    serve(socket, place)


def _in_peace(team: Sequence[ForkProcess]) -> bool:
    """Run the workers until all have ended normally, or one has failed and all are killed.

    Returns whether all ended normally.
    """
    for worker in team:
        worker.start()
    running: dict[Any, ForkProcess] = {worker.sentinel: worker for worker in team}
    while running:
        for sentinel in connection.wait([*running]):
            worker = running.pop(sentinel)
            worker.join()
            if worker.exitcode != 0:
                _tell(f"worker {team.index(worker)} {_end_of(worker.exitcode)}")
                _end(team)
                return False
    return True


def _end_of(code: int | None) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"failed with exit code {code}"


def _tell(what: str) -> None:
    print(datetime.now(UTC).isoformat(timespec="seconds"), what, file=sys.stderr, flush=True)


def _end(team: Sequence[ForkProcess]) -> None:
    for worker in team:
        worker.kill()
    for worker in team:
        worker.join()


if __name__ == "__main__":
    main()
