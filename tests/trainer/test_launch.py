from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pier_node.engine.messages import Hello, decode


class Site:
    """A real launcher with two workers that have connected and wait."""

    def __init__(self, folder: Path, max_restarts: int) -> None:
        self.folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "s"))
        self.listener.listen()
        self.listener.settimeout(60)
        options = ["--socket", str(folder / "s"), "--workers", "2", "--max-restarts", str(max_restarts)]
        command = [sys.executable, "-m", "pier_node.trainer.launch", *options]
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
