from __future__ import annotations

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
from pier_node.engine.messages import (
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Hello,
    Job,
    Message,
    Progress,
    Publishing,
    Setup,
    decode,
    encode,
)
from pier_node.trainer.data.corpus import Windows
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.replica import Replica
from pier_node.trainer.worker import WORKER, Link, Place, Worker, open_data

BATCH, CONTEXT = 4, 16


@dataclass
class Rig:
    """A real worker process, alone in its site, its launcher, and the test as its daemon."""

    folder: Path
    setup: Setup
    vectors: dict[str, SharedVector]
    process: subprocess.Popen[str] = field(init=False)
    connection: socket.socket = field(init=False)
    others: list[socket.socket] = field(init=False)

    def start(self, workers: int = 1) -> None:
        path = self.folder / "s"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(60)
        command = [sys.executable, "-m", "pier_node.trainer.worker", "--socket", str(path), "--workers", str(workers)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.others = [listener.accept()[0] for _ in range(workers - 1)]
        for other in self.others:
            other.sendall(encode(self.setup))
        self.connection, _ = listener.accept()
        self.connection.settimeout(60)
        self._lines = self.connection.makefile("rb")
        hello = self.hear()
        assert workers > 1 or hello == Hello(0, 1, 0, "cpu")
        self.say(self.setup)

    def say(self, message: Message) -> None:
        self.connection.sendall(encode(message))

    def hear(self) -> Message:
        return decode(self._lines.readline())

    def hear_until(self, kind: type[Done] | type[Failed] | type[Evaluated]) -> list[Message]:
        heard = [self.hear()]
        while not isinstance(heard[-1], kind):
            heard.append(self.hear())
        return heard


def _setup(config: RunConfig, folder: Path, vectors: dict[str, SharedVector]) -> Setup:
    paths = {name: vectors[name].path for name in ("outbox", "adam_m", "adam_v")}
    length = len(vectors["outbox"].array)
    return Setup(config.canonical(), "node-a", 0, 1, None, str(folder / "cache"), **paths, length=length)


@pytest.fixture
def rig(config: RunConfig, weights: SharedVector, tmp_path: Path) -> Iterator[Rig]:
    length = len(weights.array)
    vectors = {name: SharedVector(length) for name in ("outbox", "adam_m", "adam_v")} | {"anchor": weights}
    made = Rig(tmp_path, _setup(config, tmp_path, vectors), vectors)
    yield made
    if hasattr(made, "process"):
        made.process.kill()
        made.process.communicate()


def _job(rig: Rig, **changes: Any) -> Job:
    job = Job(1, 0, 3, BATCH, "weights", rig.vectors["anchor"].path, load_adam=True, adam_step=0)
    return replace(job, **changes)


def _tensor(rig: Rig, name: str) -> torch.Tensor:
    return torch.from_numpy(rig.vectors[name].array)


def test_jobs_through_shared_memory_have_the_bits_of_a_straight_run(
    rig: Rig, replica: Replica, windows: Windows
) -> None:
    losses = [replica.train(step, windows.batch(step, BATCH), BATCH).item() for step in range(6)]
    expected = torch.empty(3, replica.layout.length)
    replica.store_weights(expected[0])
    replica.store_moments(expected[1], expected[2])

    rig.start()
    rig.say(_job(rig))
    first, *_, publishing, done = rig.hear_until(Done)
    assert isinstance(first, Progress)
    assert isinstance(done, Done)
    assert (first.step, first.tokens) == (0, BATCH * CONTEXT)
    assert first.loss == pytest.approx(losses[0])
    assert publishing == Publishing(1)
    assert (done.tokens, done.adam_step, done.peak_bytes) == (3 * BATCH * CONTEXT, 3, 0)
    assert done.loss == pytest.approx(sum(losses[:3]) / 3)
    rig.vectors["anchor"].array[:] = rig.vectors["outbox"].array
    rig.vectors["outbox"].array[:] = 0.0
    rig.say(_job(rig, id=2, first_step=3, adam_step=3))
    assert isinstance(rig.hear_until(Done)[-1], Done)
    for name, row in zip(("outbox", "adam_m", "adam_v"), expected):
        assert torch.equal(_tensor(rig, name), row)


def test_a_gradient_job_publishes_what_autograd_gives(rig: Rig, replica: Replica, windows: Windows) -> None:
    replica.gradient(windows.batch(8, BATCH), BATCH)
    expected = torch.empty(replica.layout.length)
    replica.store_gradient(expected)
    rig.start()
    rig.say(_job(rig, payload="gradient", first_step=8, steps=1, load_adam=False))
    rig.hear_until(Done)
    assert torch.equal(_tensor(rig, "outbox"), expected)
    assert not rig.vectors["adam_m"].array.any()


def test_evaluation_between_jobs(rig: Rig, replica: Replica, windows: Windows) -> None:
    rig.start()
    rig.say(Evaluate(5, rig.vectors["anchor"].path))
    expected = replica.evaluate(_tensor(rig, "anchor"), windows.validation(2, BATCH))
    assert rig.hear() == Evaluated(5, expected)


class Said:
    """Where a worker in this process speaks to nobody."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def test_evaluation_computes_no_more_rows_at_once_than_training(
    configure: Callable[..., RunConfig], rig: Rig, replica: Replica, windows: Windows
) -> None:
    said, rows = Said(), list[int]()
    setup = replace(rig.setup, config=configure(micro_batch=3).canonical())
    worker = Worker(cast(Link, said), Place(0, 1, 0), torch.device("cpu"), setup, open_data(setup, cast(Link, said)))

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, Decoder):
            rows.append(len(inputs[0]))

    with torch.nn.modules.module.register_module_forward_pre_hook(count):
        worker.obey(Evaluate(5, rig.vectors["anchor"].path))
    assert sum(rows) == 2 * BATCH
    assert max(rows) == 3
    [evaluated] = said.messages
    assert isinstance(evaluated, Evaluated)
    whole = replica.evaluate(_tensor(rig, "anchor"), windows.validation(2, BATCH))
    assert evaluated.loss == pytest.approx(whole, rel=1e-6)


def _without_data(rig: Rig, configure: Callable[..., RunConfig]) -> Setup:
    return replace(rig.setup, data_path="/nowhere")


def _with_a_small_vocabulary(rig: Rig, configure: Callable[..., RunConfig]) -> Setup:
    config = configure()
    small = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 128})})
    return _setup(small, rig.folder, rig.vectors)


@pytest.mark.parametrize(
    ("spoil", "words"), [(_without_data, "/nowhere"), (_with_a_small_vocabulary, "vocab_size = 256")]
)
def test_what_no_restart_mends_is_told_and_the_worker_waits(
    rig: Rig, configure: Callable[..., RunConfig], spoil: Callable[[Rig, Callable[..., RunConfig]], Setup], words: str
) -> None:
    rig.setup = spoil(rig, configure)
    rig.start()
    failed = rig.hear()
    assert isinstance(failed, Failed)
    assert words in failed.problem + failed.remedy
    assert rig.process.poll() is None
    rig.connection.shutdown(socket.SHUT_RDWR)
    assert rig.process.wait(10) == 0


def test_workers_join_only_when_the_data_is_there(rig: Rig, configure: Callable[..., RunConfig]) -> None:
    """Once they have joined, a wait of ten minutes is taken for a death."""
    os.mkfifo(tokenizer := rig.folder / "tokenizer.json")
    config = configure()
    slow = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(tokenizer)})})
    rig.setup = replace(rig.setup, config=slow.canonical())
    rig.start(workers=2)
    with tokenizer.open("w"):  # returns when a worker reads it, which then waits for what is written
        assert not list(rig.folder.glob("s.group-*"))


def test_an_empty_batch_is_refused(rig: Rig) -> None:
    rig.start()
    rig.say(_job(rig, sequences=0))
    failed = rig.hear_until(Failed)[-1]
    assert isinstance(failed, Failed)
    assert "0 sequence" in failed.problem


def test_a_worker_leaves_in_mid_job_when_its_daemon_is_gone(rig: Rig) -> None:
    rig.start()
    rig.say(_job(rig, steps=1_000_000))
    assert isinstance(rig.hear(), Progress)
    [worker] = psutil.Process(rig.process.pid).children()
    worker.send_signal(signal.SIGINT)  # Ctrl+C is not for workers
    assert isinstance(rig.hear(), Progress)
    rig.connection.shutdown(socket.SHUT_RDWR)
    assert rig.process.wait(10) == 0


def test_sigterm_ends_a_worker(rig: Rig) -> None:
    rig.start()
    rig.say(_job(rig, steps=1_000_000))
    assert isinstance(rig.hear(), Progress)
    [worker] = psutil.Process(rig.process.pid).children()
    assert worker.name() == WORKER
    worker.terminate()
    assert rig.process.wait(10) == 1
    assert rig.process.stderr
    assert "worker 0 was killed by SIGTERM" in rig.process.stderr.read()


def test_a_lone_worker_joins_nothing() -> None:
    Place(rank=0, world=1, attempt=0).join(torch.device("cpu"), "/nowhere/socket")
    assert not dist.is_initialized()


ECHO = """
import sys, time
from pier_node.trainer.worker import Link
from pier_node.engine.messages import Evaluated
link = Link(sys.argv[1])
request = link.receive()
link.send(Evaluated(request.id, 0.5))
print("sent", flush=True)
if sys.argv[2] == "compute":
    while True:
        pass
link.receive()
"""


def _start(path: Path, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ECHO, str(path), then], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def server(tmp_path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    listener.settimeout(30)
    return listener


@pytest.mark.parametrize("then", ["wait", "compute"])
def test_a_worker_leaves_in_peace_when_its_daemon_is_gone(server: socket.socket, tmp_path: Path, then: str) -> None:
    worker = _start(tmp_path / "socket", then)
    connection, _ = server.accept()
    connection.sendall(encode(Evaluate(7, "vector")))
    assert decode(connection.makefile("rb").readline()) == Evaluated(7, 0.5)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "sent\n"
    connection.shutdown(socket.SHUT_RDWR)
    assert worker.wait(10) == 0


def test_a_worker_that_comes_too_late_leaves_in_peace(tmp_path: Path) -> None:
    assert _start(tmp_path / "socket", "wait").wait(30) == 0


def test_what_is_no_message_ends_the_worker_with_a_reason(server: socket.socket, tmp_path: Path) -> None:
    worker = _start(tmp_path / "socket", "wait")
    connection, _ = server.accept()
    connection.sendall(b"nonsense\n")
    _, errors = worker.communicate(timeout=30)
    assert "PierError: a line between daemon and worker is no message" in errors
    assert worker.returncode == 1


class Site:
    """A real launcher with two workers that have connected and wait."""

    def __init__(self, folder: Path, max_restarts: int) -> None:
        self.folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "s"))
        self.listener.listen()
        self.listener.settimeout(60)
        options = ["--socket", str(folder / "s"), "--workers", "2", "--max-restarts", str(max_restarts)]
        command = [sys.executable, "-m", "pier_node.trainer.worker", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.connections: list[socket.socket] = []

    def gather(self) -> list[Hello]:
        """What the two workers that come next say, by rank."""
        self.connections = [self.listener.accept()[0] for _ in range(2)]
        hellos = [decode(connection.makefile("rb").readline()) for connection in self.connections]
        return sorted((hello for hello in hellos if isinstance(hello, Hello)), key=lambda hello: hello.rank)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, max_restarts=1)
    assert made.gather() == [Hello(0, 2, 0, "cpu"), Hello(1, 2, 0, "cpu")]
    yield made
    made.process.kill()
    made.process.wait()


def test_all_workers_are_restarted_when_one_dies_until_it_is_too_often(site: Site) -> None:
    first = site.workers()
    first[0].kill()
    assert site.gather() == [Hello(0, 2, 1, "cpu"), Hello(1, 2, 1, "cpu")]
    assert psutil.wait_procs(first, timeout=10)[1] == []
    second = site.workers()
    second[1].kill()
    assert site.process.wait(30) == 1
    assert psutil.wait_procs(second, timeout=10)[1] == []


def test_nothing_is_left_of_a_killed_launcher(site: Site) -> None:
    workers = site.workers()
    assert len(workers) == 2
    site.process.kill()
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_when_the_daemon_closes_its_sockets_all_end_in_peace(site: Site) -> None:
    listening = {
        connection.laddr.ip
        for process in (psutil.Process(site.process.pid), *site.workers())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1"}  # nothing of a site can be reached from outside
    site.listener.close()
    for connection in site.connections:
        connection.shutdown(socket.SHUT_RDWR)
    assert site.process.wait(30) == 0


def test_sigterm_ends_a_launcher_and_its_workers(site: Site) -> None:
    workers = site.workers()
    os.kill(site.process.pid, signal.SIGTERM)
    assert site.process.wait(30) != 0
    assert psutil.wait_procs(workers, timeout=10)[1] == []
