"""Pier's own training program: processes, one per device, that do the inner steps their daemon requests; a launcher.

The daemon runs the launcher as `python -m pier_node.trainer.worker`. It loads PyTorch once and forks the workers, which
can then start and restart without loading it. When one worker dies, all of them are restarted. The launcher ends when
a worker ends normally, when they have died too often, or with its daemon.

A worker is a training loop around `Site.step`, as that of any program that calls `pier.join` (engine/client.py). The
workers of a site find each other on the loopback interface, through a file. When the daemon closes the connection, rank
0 ends at once, even in the middle of a step, and the launcher ends the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib import import_module
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.base.processes import call_process, die_with_parent, spin_little
from pier_node.base.shared import attach
from pier_node.config.program import described
from pier_node.config.run import RunConfig
from pier_node.engine import messages
from pier_node.engine.client import DaemonConnection, Site, StopTraining
from pier_node.engine.machines import Ranks
from pier_node.engine.training_process import ENGINE_VARIABLE
from pier_node.outer.layout import Layout
from pier_node.trainer import devices
from pier_node.trainer.command import Setup
from pier_node.trainer.data.corpus import Batch, Corpus, Windows, open_corpus, share
from pier_node.trainer.data.prefetch import Prefetch
from pier_node.trainer.data.tokens import Tokenizer, open_tokenizer
from pier_node.trainer.model.cost import chosen, flops_per_token
from pier_node.trainer.parallel import DDP, Parallel
from pier_node.trainer.replica import Replica

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A worker that waits this long for another in a step gives up, and the site's workers are restarted."""
PATIENCE = 300.0
"""Seconds between two steps, at least, before the workers count as hung."""


@dataclass(frozen=True)
class Place:
    """Which worker this is: rank of world, in the launcher's restart number `attempt`, and how they share the model."""

    rank: int
    world: int
    attempt: int
    parallel: Parallel = DDP

    def join(self, socket: str) -> None:
        """Create the site's process group, stored in a file next to the daemon's socket; nothing for one worker."""
        if self.world == 1:
            return
        dist.init_process_group(
            "nccl" if torch.cuda.device_count() else "gloo",
            init_method=f"file://{socket}.group-{os.getppid()}-{self.attempt}",
            rank=self.rank,
            world_size=self.world,
            timeout=COLLECTIVE_TIMEOUT,
        )


FAILED_SECONDS = 60.0
"""What the daemon gets to end this program after it was told why it cannot train."""


class Worker:
    """The model, the data and the shared vectors of one worker, as `Site` moves them: a TrainingState.

    It keeps nothing to itself: its weights come from the daemon, and AdamW's moments stay with it.

    `parallel` is not auto.

    Attributes:
        adam_step: number of AdamW steps behind the moments that were published or loaded last.
    """

    def __init__(self, link: DaemonConnection, config: RunConfig, setup: Setup, parallel: Parallel = DDP) -> None:
        self.can: Sequence[messages.Ability] = get_args(messages.Ability)
        self._link, self._ranks, self._config, self._setup, self._parallel = link, link.ranks, config, setup, parallel
        self.device = devices.pick(self._ranks.own, self._ranks.count)
        self._steps = self.adam_step = 0

    def enter(self, place: messages.Attached) -> None:
        """Open the data of the site, and make room for the model."""
        link, ranks, config = self._link, self._ranks, self._config
        link.send(self._ready())
        corpus = open_data(config, self._setup, place, link, ranks.own)
        model = config.model
        self._windows = Windows(corpus, model.context, config.run.seed, self._setup.node, model.vocab_size)
        self._batches = Prefetch(self._rows, self.device)
        link.send(messages.Opened(len(corpus.train), len(corpus.validation)))
        self._parallel.check(config, ranks.count)
        self._replica = Replica(config, self.device, ranks.count, self._parallel)
        self._outbox, self._adam_m, self._adam_v = map(self._attach, (place.outbox, place.adam_m, place.adam_v))

    def _ready(self) -> messages.Ready:
        device, count = self.device, self._ranks.count
        bf16 = devices.uses_bf16(device, self._config.inner.precision)
        full = devices.full_speed(device, count, bf16, flops_per_token(self._config.model))
        words = devices.describe(device, count, bf16, devices.compiles(device, self._config, self._parallel))
        return messages.Ready(words, full, devices.fallback(device))

    def load(self, job: messages.Train) -> None:
        """Take the weights, and AdamW's moments if they have changed."""
        self._job = job
        self._replica.load_weights(self._attach(job.load))
        if job.moments is not None:
            self._replica.load_moments(self._adam_m, self._adam_v, job.moments)
            self.adam_step = job.moments

    def step(self, index: int) -> tuple[float, Tensor, Tensor]:
        """Do inner step `index` of the run, or compute its gradient, if that is all that the daemon wants.

        Returns this worker's share of the tokens, the loss, and the norm of the gradient before clipping.
        """
        replica, sequences, self._steps = self._replica, self._job.sequences, index + 1
        rows = self._batches.rows(index, sequences)
        if self._job.publish == "gradient":
            loss = replica.gradient(rows, sequences)
        else:
            loss = replica.train(index, rows, sequences)
        return sequences * replica.context / self._ranks.count, loss, replica.gradient_norm

    def publish(self, job: messages.Train) -> None:
        """Publish the weights and AdamW's moments, or the gradient."""
        # Nobody writes before the daemon was told; all have written before it is told of the end.
        if job.publish == "gradient":
            self._ranks.meet()
            self._replica.store_gradient(self._outbox)
        else:
            while isinstance(message := self._link.receive(), messages.Enough):
                pass  # it comes too late
            if not isinstance(message, messages.Publish):
                raise PierError(f"a worker may publish before anything else, but the daemon sent {message}")
            self._replica.store_weights(self._outbox)
            if message.moments:
                self._replica.store_moments(self._adam_m, self._adam_v)
                self.adam_step = self._replica.adam_step
        self._ranks.meet()

    def answer(self, request: messages.Evaluate | messages.Rate) -> None:
        """Tell the validation loss and what the model writes, or the loss of rows, with the weights of the request."""
        replica, weights = self._replica, self._attach(request.weights)
        if isinstance(request, messages.Evaluate):
            inner, shares = self._config.inner, replica.shares
            own = self._windows.validation(
                inner.eval_batches, inner.batch_size, self._at_once, shares.own, shares.count
            )
            loss = replica.evaluate(weights, own)
            wanted = self._setup.samples and self._steps and self._ranks.own == 0  # untrained, it writes anything
            if wanted and math.isfinite(loss):
                sample = replica.sample(self._tokenizer, messages.WORDS)
                self._link.send(messages.Logged(self._steps, {messages.SAMPLE: sample}))
            self._link.send(messages.Evaluated(request.id, loss))
        elif self._ranks.own == 0:
            losses = replica.rate(weights, np.load(request.rows), self._at_once)
            self._link.send(messages.Rated(request.id, losses.tolist()))

    def finish(self, path: str) -> None:
        """Load the weights."""
        self._replica.load_weights(self._attach(path))

    def keep(self) -> None:
        """The daemon has everything."""

    def _rows(self, step: int, sequences: int) -> Batch:
        shares = self._replica.shares
        if sequences < shares.count:
            raise PierError(
                f"a batch of {sequences} sequence(s) cannot be dealt to the {shares.count} workers of this site",
                f"Raise inner.batch_size to {shares.count} or more, or start this node with --workers {sequences}.",
            )
        return self._windows.rows(step, *share(sequences, shares.own, shares.count))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(self._config.data.tokenizer)

    @property
    def _at_once(self) -> int:
        """Maximum number of sequences that this worker computes together in a step: its memory suffices for them."""
        inner = self._config.inner
        own = max(1, inner.batch_size // self._replica.shares.count)
        return min(own, inner.micro_batch or own)

    def _attach(self, path: str) -> Tensor:
        return torch.from_numpy(attach(path, self._replica.layout.length))


def serve(place: Place) -> None:
    """Train for the daemon that has started this program until it is gone, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides about Ctrl+C
    setup, path = Setup.of_environment(), os.environ[ENGINE_VARIABLE]
    stream = _connected(path) if place.rank == 0 else None
    devices.share_cores(place.world)
    place.join(path)
    link = DaemonConnection(stream, Ranks())
    try:
        _train(link, setup, place.parallel)
    except PierError as error:
        # A restart would meet the same error, and so do all ranks. The daemon ends this program after reporting it.
        with contextlib.suppress(PierError):
            link.send(messages.Failed(error.problem, error.remedy))
        time.sleep(FAILED_SECONDS)
        raise


def _connected(path: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        os._exit(0)

    def leave() -> None:
        poll = select.poll()
        poll.register(stream, select.POLLRDHUP)
        poll.poll()
        # The main thread may be inside a kernel or a collective for seconds: only this ends it immediately.
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    return stream


def _train(link: DaemonConnection, setup: Setup, parallel: Parallel) -> None:
    config = setup.run
    worker, step_tokens = Worker(link, config, setup, parallel), config.inner.batch_size * config.model.context
    tensors = described((entry.name, entry.shape) for entry in Layout.of(config.model).entries)
    link.send(messages.Attach(messages.VERSION, [*tensors], step_tokens, "", link.ranks.count, PATIENCE, [*worker.can]))
    site = Site(worker, link, step_tokens)
    with contextlib.suppress(StopTraining):
        while True:
            site.step(*worker.step(site.step_index))


def open_data(config: RunConfig, setup: Setup, place: messages.Attached, link: DaemonConnection, rank: int) -> Corpus:
    """The tokens of the site. Rank 0 creates them if necessary, and the daemon hears of the progress.

    That may take hours, so the other ranks wait for the files, not in a collective, which has a deadline.
    """

    def told(read: int, size: int) -> None:
        link.send(messages.Tokenizing(read, size))

    return open_corpus(config.data, place.slot, place.slots, setup.data_path, Path(place.folder), told, rank == 0)


MAX_RESTARTS = 3
"""The launcher ends when workers have died more often; its daemon decides whether it is started again."""
WORKER = "pier-worker"
"""Name of a worker in `top` and `ps -o comm`."""

_FORK = get_context("fork")


def main() -> None:
    """Run the workers. Exit code 1: they died too often."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=0, help="0: one for each device")
    workers = parser.parse_args().workers
    if ENGINE_VARIABLE not in os.environ:  # started early: see early_start.py
        if not (told := sys.stdin.read()):
            return
        os.environ.update(json.loads(told))
    _set_environment()
    with _FORK.Pool(1) as pool:  # not here: a driver that is loaded before a fork does not work after it
        world, parallel = pool.apply(_plan, (Setup.of_environment(), workers))
    if parallel.shards(world):
        import_module("pier_node.trainer.sharding")  # once for all workers and their restarts
    for attempt in range(MAX_RESTARTS + 1):
        team = [_FORK.Process(target=_work, args=(Place(rank, world, attempt, parallel),)) for rank in range(world)]
        if _in_peace(team):
            return
    sys.exit(1)


def _set_environment() -> None:
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    os.environ.pop("WORLD_SIZE", None)  # of what has started the daemon
    spin_little()


def _plan(setup: Setup, workers: int) -> tuple[int, Parallel]:
    """The number of workers, and how they share the model."""
    config, world = setup.run, workers or devices.count()
    bf16 = devices.uses_bf16(devices.pick(), config.inner.precision)
    return world, chosen(setup.parallel, config, world, devices.memory(), bf16)


def _work(place: Place) -> None:
    die_with_parent()
    call_process(WORKER)
    serve(place)


def _in_peace(team: Sequence[ForkProcess]) -> bool:
    """Run the workers until one has ended; then end the others. Returns whether it ended normally: its daemon left."""
    for worker in team:
        worker.start()
    ready = connection.wait([worker.sentinel for worker in team])
    ended = [rank for rank, worker in enumerate(team) if worker.sentinel in ready]
    for rank in ended:
        team[rank].join()
        if code := team[rank].exitcode:
            now, end = datetime.now(UTC).isoformat(timespec="seconds"), f"failed with exit code {code}"
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else end
            print(now, f"worker {rank} {end}", file=sys.stderr, flush=True)
    for worker in team:
        worker.kill()
    for worker in team:
        worker.join()
    return any(team[rank].exitcode == 0 for rank in ended)


if __name__ == "__main__":
    main()
