from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer

import pytest

from pier_node.base.errors import PierError
from pier_node.base.processes import ticks_of
from pier_node.site.running import CLOCK_STEP, Running, find_daemon


class Page(BaseHTTPRequestHandler):
    """A status page."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/status" else 404)
        self.end_headers()
        self.wfile.write(b'{"round": 7}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def http() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that passes for a daemon by its command line."""
    started = subprocess.Popen([sys.executable, "-c", "input()", "pier-node"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


def note(folder: Path, pid: int, http: str = "http://127.0.0.1:1", age: float = 0.0, **began: int) -> None:
    path = folder / "daemon.json"
    path.write_text(json.dumps({"pid": pid, "http": http, **began}))
    written = path.stat().st_mtime - age
    os.utime(path, (written, written))


def test_a_daemon_is_found_and_asked(tmp_path: Path, process: subprocess.Popen[bytes], http: str) -> None:
    note(tmp_path, process.pid, http)
    running = find_daemon(tmp_path)
    assert running == Running(tmp_path, process.pid, http)
    assert running.status() == {"round": 7}


def test_a_proxy_for_the_web_is_not_asked(http: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Running(tmp_path, 1, http).status() == {"round": 7}


def test_a_daemon_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"process 42.*does not answer") as error:
        Running(tmp_path, 42, "http://127.0.0.1:9").status()
    assert "pier-node stop" in error.value.remedy


def test_what_another_program_answers_is_no_answer(tmp_path: Path) -> None:
    class Other(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")

    with TCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(PierError, match="does not answer"):
            Running(tmp_path, 42, f"http://127.0.0.1:{server.server_address[1]}").status()


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_daemon(tmp_path) is None
    assert find_daemon(tmp_path / "missing") is None


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', '{"pid": "x", "http": ""}'])
def test_a_file_that_was_cut_off_is_no_daemon(tmp_path: Path, text: str) -> None:
    (tmp_path / "daemon.json").write_text(text)
    assert find_daemon(tmp_path) is None


def test_a_process_that_began_after_the_file_is_another_one(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """Its daemon died, and the system gave its number away again."""
    note(tmp_path, process.pid, age=3600)
    assert find_daemon(tmp_path) is None
    note(tmp_path, process.pid, age=CLOCK_STEP / 2)
    assert find_daemon(tmp_path) is not None


def test_a_clock_that_was_set_after_the_start_hides_no_daemon(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """The system tells the time of a process's start by the clock of now."""
    note(tmp_path, process.pid, age=3600, began=ticks_of(process.pid))
    assert find_daemon(tmp_path) is not None
    note(tmp_path, process.pid, began=ticks_of(process.pid) - 1)
    assert find_daemon(tmp_path) is None


def test_another_program_is_no_daemon(tmp_path: Path) -> None:
    note(tmp_path, 1)
    assert find_daemon(tmp_path) is None


def test_a_process_that_is_over_is_no_daemon(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    note(tmp_path, process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert find_daemon(tmp_path) is None
    process.wait()
    assert find_daemon(tmp_path) is None
