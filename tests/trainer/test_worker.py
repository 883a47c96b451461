from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.engine.client import DaemonConnection
from pier_node.engine.machines import Ranks
from pier_node.engine.messages import (
    Attach,
    Attached,
    Done,
    Enough,
    Evaluate,
    Evaluated,
    Failed,
    Message,
    Opened,
    Progress,
    Publish,
    Publishing,
    Ready,
    Train,
    decode,
    encode,
)
from pier_node.engine.ranks import COLUMNS
from pier_node.engine.training_process import ENGINE_VARIABLE
from pier_node.trainer.command import Setup
from pier_node.trainer.data.corpus import Windows
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.replica import Replica
from pier_node.trainer.worker import WORKER, Place, Worker

BATCH, CONTEXT = 4, 16


@dataclass
class Rig:
    """The real program of a site, which is started by the test as its daemon, and set up."""

    folder: Path
    setup: Setup
    place: Attached
    vectors: dict[str, SharedVector]
    attach: Attach = field(init=False)
    process: subprocess.Popen[str] = field(init=False)
    connection: socket.socket = field(init=False)
    asked: str = ""

    def start(self, workers: int = 1) -> None:
        path = str(self.folder / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(60)
        self.process = launch(path, self.setup, workers)
        self.enter()

    def enter(self) -> None:
        """A program comes, is told its place, and is ready."""
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(60)
        self._lines = self.connection.makefile("rb")
        attach = self.hear()
        assert isinstance(attach, Attach)
        self.attach = attach
        self.say(self.place)
        ready = self.hear()
        assert isinstance(ready, Ready)
        assert ready.device

    def say(self, message: Message) -> None:
        if isinstance(message, Train):
            self.asked = message.publish
        self.connection.sendall(encode(message))

    def hear(self) -> Message:
        """What the program says next, besides how much data it has; it may publish at once."""
        message = decode(self._lines.readline())
        if isinstance(message, Opened):
            assert min(message.train, message.validation) > CONTEXT
            message = decode(self._lines.readline())
        if isinstance(message, Publishing) and self.asked == "weights":
            self.say(Publish())
        return message

    def hear_until(self, kind: type[Done] | type[Failed] | type[Evaluated]) -> list[Message]:
        heard = [self.hear()]
        while not isinstance(heard[-1], kind):
            heard.append(self.hear())
        return heard

    def leave(self) -> int:
        """The daemon closes its end; returns the exit code of the program."""
        self._listener.close()
        self.connection.shutdown(socket.SHUT_RDWR)
        return self.process.wait(60)

    def workers(self) -> list[psutil.Process]:
        """The processes of the workers, by rank."""
        return psutil.Process(self.process.pid).children(recursive=True)


def launch(path: str, setup: Setup, workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pier_node.trainer.worker", "--workers", str(workers)]
    environment = {**os.environ, **setup.environment(), ENGINE_VARIABLE: path}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def rig(config: RunConfig, weights: SharedVector, tmp_path: Path) -> Iterator[Rig]:
    length, own = len(weights.array), ("outbox", "adam_m", "adam_v")
    vectors = {name: SharedVector(length) for name in own} | {"anchor": weights, "table": SharedVector(2 * COLUMNS)}
    paths = {name: vectors[name].path for name in (*own, "table")}
    place = Attached(
        **paths, slot=0, slots=1, total_steps=100, folder=str(tmp_path / "cache"), daemon=os.getpid(), publish=False
    )
    made = Rig(tmp_path, Setup(config.canonical(), "node-a", None), place, vectors)
    yield made
    if hasattr(made, "process"):
        made.process.kill()
        made.process.communicate()


def _job(rig: Rig, **changes: Any) -> Train:
    job = Train(1, 0, 3, rig.vectors["anchor"].path, False, round=0, sites=1, losses={}, sequences=BATCH, moments=0)
    return replace(job, **changes)


def _tensor(rig: Rig, name: str) -> torch.Tensor:
    return torch.from_numpy(rig.vectors[name].array)


def test_jobs_through_shared_memory_have_the_bits_of_a_straight_run(
    rig: Rig, replica: Replica, windows: Windows
) -> None:
    losses = [replica.train(0, windows.batch(0, BATCH), BATCH).item()]
    norm = replica.gradient_norm.item()
    losses += [replica.train(step, windows.batch(step, BATCH), BATCH).item() for step in range(1, 6)]
    expected = torch.empty(3, replica.layout.length)
    replica.store_weights(expected[0])
    replica.store_moments(expected[1], expected[2])

    rig.start()
    rig.say(_job(rig))
    first, *_, publishing, done = rig.hear_until(Done)
    assert isinstance(first, Progress)
    assert isinstance(done, Done)
    assert (first.step, first.tokens) == (0, BATCH * CONTEXT)
    assert first.gradient_norm == pytest.approx(norm)
    assert first.loss == pytest.approx(losses[0])
    assert publishing == Publishing(1)
    assert (done.tokens, done.adam_step, done.peak_bytes) == (3 * BATCH * CONTEXT, 3, 0)
    rig.vectors["anchor"].array[:] = rig.vectors["outbox"].array
    rig.vectors["outbox"].array[:] = 0.0
    rig.say(_job(rig, id=2, first_step=3, moments=3))
    assert isinstance(rig.hear_until(Done)[-1], Done)
    for name, row in zip(("outbox", "adam_m", "adam_v"), expected):
        assert torch.equal(_tensor(rig, name), row)


@pytest.mark.thorough
def test_a_job_ends_early_when_it_is_enough(rig: Rig, replica: Replica, windows: Windows) -> None:
    rig.start()
    rig.say(_job(rig, steps=1_000_000))
    assert isinstance(rig.hear(), Progress)
    rig.say(Enough(1))
    done = rig.hear_until(Done)[-1]
    assert isinstance(done, Done)
    assert 0 < done.steps < 1_000_000
    assert (done.tokens, done.adam_step) == (done.steps * BATCH * CONTEXT, done.steps)
    for step in range(done.steps):
        replica.train(step, windows.batch(step, BATCH), BATCH)
    expected = torch.empty(replica.layout.length)
    replica.store_weights(expected)
    assert torch.equal(_tensor(rig, "outbox"), expected)


def test_a_gradient_job_publishes_what_autograd_gives(rig: Rig, replica: Replica, windows: Windows) -> None:
    replica.gradient(windows.batch(8, BATCH), BATCH)
    expected = torch.empty(replica.layout.length)
    replica.store_gradient(expected)
    rig.start()
    rig.say(_job(rig, publish="gradient", first_step=8, steps=1, moments=None))
    rig.hear_until(Done)
    assert torch.equal(_tensor(rig, "outbox"), expected)
    assert not rig.vectors["adam_m"].array.any()


@pytest.mark.thorough
def test_evaluation_between_jobs(rig: Rig, replica: Replica, windows: Windows) -> None:
    rig.start()
    rig.say(Evaluate(5, rig.vectors["anchor"].path))
    expected = replica.evaluate(_tensor(rig, "anchor"), windows.validation(2, BATCH))
    assert rig.hear() == Evaluated(5, expected)


class Said:
    """Where a worker in this process speaks to nobody."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ranks = Ranks()

    def send(self, message: Message) -> None:
        self.messages.append(message)


@pytest.mark.thorough
def test_evaluation_computes_no_more_rows_at_once_than_training(
    configure: Callable[..., RunConfig], rig: Rig, replica: Replica, windows: Windows
) -> None:
    said, rows = Said(), list[int]()
    worker = Worker(cast(DaemonConnection, said), configure(micro_batch=3), rig.setup)
    worker.enter(rig.place)

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, Decoder):
            rows.append(len(inputs[0]))

    with torch.nn.modules.module.register_module_forward_pre_hook(count):
        worker.answer(Evaluate(5, rig.vectors["anchor"].path))
    assert sum(rows) == 2 * BATCH
    assert max(rows) == 3
    evaluated = said.messages[-1]
    assert isinstance(evaluated, Evaluated)
    whole = replica.evaluate(_tensor(rig, "anchor"), windows.validation(2, BATCH))
    assert evaluated.loss == pytest.approx(whole, rel=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_no_restart_mends_is_told_and_the_worker_waits(rig: Rig, workers: int) -> None:
    rig.setup = replace(rig.setup, data_path="/nowhere")
    rig.start(workers)
    failed = rig.hear()
    assert isinstance(failed, Failed)
    assert "/nowhere" in failed.problem
    assert rig.process.poll() is None
    assert rig.leave() == 0


@pytest.mark.thorough
def test_one_worker_tokenizes_and_the_others_wait(rig: Rig) -> None:
    with (rig.folder / "cache.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if another program were tokenizing
        rig.start(workers=2)
        rig.say(Evaluate(5, rig.vectors["anchor"].path))
        rig.connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            rig.connection.recv(1, socket.MSG_PEEK)
        rig.connection.settimeout(60)
    assert isinstance(rig.hear(), Evaluated)


@pytest.mark.thorough
def test_an_empty_batch_is_refused(rig: Rig) -> None:
    rig.start()
    rig.say(_job(rig, sequences=0))
    failed = rig.hear_until(Failed)[-1]
    assert isinstance(failed, Failed)
    assert "0 sequence" in failed.problem


@pytest.mark.thorough
def test_a_worker_leaves_in_mid_job_when_its_daemon_is_gone(rig: Rig) -> None:
    rig.start()
    rig.say(_job(rig, steps=1_000_000))
    assert isinstance(rig.hear(), Progress)
    [worker] = rig.workers()
    worker.send_signal(signal.SIGINT)  # Ctrl+C is not for workers
    assert isinstance(rig.hear(), Progress)
    assert rig.leave() == 0


@pytest.mark.thorough
def test_workers_that_wait_leave_when_their_daemon_is_gone(rig: Rig) -> None:
    rig.start(workers=2)
    workers = rig.workers()
    listening = {
        connection.laddr.ip
        for process in (psutil.Process(rig.process.pid), *workers)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1"}  # nothing of a site can be reached from outside
    assert rig.leave() == 0
    assert psutil.wait_procs(workers, timeout=30)[1] == []


@pytest.mark.thorough
def test_a_program_says_what_it_is_and_can_do(rig: Rig, replica: Replica) -> None:
    rig.start()
    assert rig.attach.ranks == 1
    assert [*rig.attach.can] == ["gradient", "moments", "evaluate", "rate"]
    assert rig.attach.tensors[0] == "embedding.weight 256x32"
    assert len(rig.attach.tensors) == len(replica.layout.entries)


@pytest.mark.thorough
def test_sigterm_ends_a_worker(rig: Rig) -> None:
    rig.start()
    rig.say(_job(rig, steps=1_000_000))
    assert isinstance(rig.hear(), Progress)
    [worker] = rig.workers()
    assert worker.name() == WORKER
    worker.terminate()
    rig.enter()
    assert rig.leave() == 0
    assert rig.process.stderr
    assert "worker 0 was killed by SIGTERM" in rig.process.stderr.read()


def test_a_lone_worker_joins_nothing() -> None:
    Place(rank=0, world=1, attempt=0).join("/nowhere/socket")
    assert not dist.is_initialized()


@pytest.mark.thorough
def test_a_worker_that_comes_too_late_leaves_in_peace(rig: Rig) -> None:
    rig.process = launch(str(rig.folder / "nothing"), rig.setup, 1)
    assert rig.process.wait(60) == 0


@pytest.mark.thorough
def test_what_is_no_message_is_told(rig: Rig) -> None:
    rig.start()
    rig.connection.sendall(b"nonsense\n")
    failed = rig.hear()
    assert isinstance(failed, Failed)
    assert "is no message" in failed.problem
    assert rig.leave() == 0


def test_all_workers_are_restarted_when_one_dies_until_it_is_too_often(rig: Rig) -> None:
    rig.start(workers=2)
    for victim in (0, 1, 1):
        before = rig.workers()
        assert len(before) == 2
        before[victim].kill()
        rig.enter()
        assert rig.attach.ranks == 2
        assert psutil.wait_procs(before, timeout=30)[1] == []
    last = rig.workers()
    last[0].kill()
    assert rig.process.wait(60) == 1
    assert psutil.wait_procs(last, timeout=30)[1] == []


def test_nothing_is_left_of_a_killed_launcher(rig: Rig) -> None:
    rig.start(workers=2)
    workers = rig.workers()
    assert len(workers) == 2
    rig.process.kill()
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_sigterm_ends_a_launcher_and_its_workers(rig: Rig) -> None:
    rig.start(workers=2)
    workers = rig.workers()
    rig.process.terminate()
    assert rig.process.wait(60) != 0
    assert psutil.wait_procs(workers, timeout=30)[1] == []
