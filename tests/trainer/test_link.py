from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pier_node.engine.messages import Evaluate, Evaluated, decode, encode

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
