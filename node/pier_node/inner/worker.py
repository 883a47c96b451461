"""A worker: one process on one device that does the inner steps its daemon asks for. See launch.py, which starts it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pier_node.config import from_canonical
from pier_node.data.corpus import Corpus, open_corpus
from pier_node.data.tokens import check_vocab
from pier_node.data.windows import Batch, Windows, share
from pier_node.errors import PierError
from pier_node.inner import devices
from pier_node.inner.link import Link
from pier_node.inner.messages import (
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
)
from pier_node.inner.place import Place
from pier_node.inner.replica import Replica
from pier_node.shared import attach

REPORT_INTERVAL = 0.2
"""Seconds between reports of progress, at least: each makes the device wait for its queue to run empty."""


class Worker:
    """The model, the data and the shared vectors of one worker, and what it does with them.

    Args:
        link: to the daemon.
        place: among the workers of the site, who have joined.
        device: its own.
        setup: what the daemon said first.
        corpus: the site's, which it names.
    """

    def __init__(self, link: Link, place: Place, device: torch.device, setup: Setup, corpus: Corpus) -> None:
        config = from_canonical(setup.config)
        self._link, self._place, self._device, self._inner = link, place, device, config.inner
        self._windows = Windows(corpus, config.model.context, config.run.seed, setup.node)
        self._replica = Replica(config, device, place.world)
        self._length = self._replica.layout.length
        self._outbox, self._adam_m, self._adam_v = map(self._attach, (setup.outbox, setup.adam_m, setup.adam_v))

    def obey(self, message: Message) -> None:
        """Do what the daemon says."""
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
        """The most sequences that this worker computes together in a step: it has memory for so many."""
        own = max(1, self._inner.batch_size // self._place.world)
        return min(own, self._inner.micro_batch or own)

    def _tokens(self, job: Job, steps: int) -> int:
        return steps * job.sequences * self._replica.context

    def _attach(self, path: str) -> Tensor:
        return torch.from_numpy(attach(path, self._length))


def open_data(setup: Setup, link: Link) -> Corpus:
    """The tokens of the site; one of its workers makes them if need be, and keeps the daemon informed."""
    config = from_canonical(setup.config)

    def told(read: int, size: int) -> None:
        link.send(Tokenizing(read, size))

    corpus = open_corpus(config.data, setup.slot, setup.slots, setup.data_path, Path(setup.cache), told)
    check_vocab(corpus.vocab_size, config.model.vocab_size)
    return corpus


def serve(socket: str, place: Place) -> None:
    """Serve the daemon that listens at a socket, until it is gone: this process ends then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the daemon's to decide about
    link = Link(socket)
    try:
        _serve(link, place, socket)
    except PierError as error:
        # A restart would only meet it again. The daemon ends this process when it has told its people.
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
    # Before the workers join: from then on they give each other up after COLLECTIVE_TIMEOUT.
    corpus = open_data(setup, link)
    place.join(device, socket)
    worker = Worker(link, place, device, setup, corpus)
    while True:
        worker.obey(link.receive())
