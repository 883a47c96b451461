from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from processes.run import Run

Call = Callable[..., Result]

STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
input()
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[int]:
    """A daemon, by its command line and its daemon.json, that does not listen to SIGTERM."""
    words = [sys.executable, "-c", STUBBORN, "pier-node"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        (tmp_path / "daemon.json").write_text(json.dumps({"pid": process.pid, "http": "http://127.0.0.1:1"}))
        yield process.pid
        process.kill()


def test_nothing_to_stop(call: Call, tmp_path: Path) -> None:
    done = call("stop", "--data", tmp_path)
    assert done.exit_code == 0
    assert "No daemon runs" in done.output


def test_what_a_dead_daemon_left_is_cleaned_up(call: Call, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "daemon.json").write_text(json.dumps({"pid": gone.pid, "http": "http://127.0.0.1:1"}))
    done = call("stop", "--data", tmp_path)
    assert done.exit_code == 0
    assert "was removed" in done.output
    assert not (tmp_path / "daemon.json").exists()


def test_another_program_is_left_alone(call: Call, tmp_path: Path) -> None:
    """A process that got the daemon's number after it died."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (tmp_path / "daemon.json").write_text(json.dumps({"pid": other.pid, "http": "http://127.0.0.1:1"}))
        assert call("stop", "--data", tmp_path).exit_code == 0
        assert other.poll() is None
        other.communicate(b"\n", timeout=60)
    assert other.returncode == 0


def test_one_that_does_not_end_is_said_with_what_to_do(call: Call, tmp_path: Path, stubborn: int) -> None:
    failed = call("stop", "--data", tmp_path, "--timeout", "0.1")
    assert failed.exit_code == 1
    assert "has not ended within 0.1 s" in failed.output
    assert f"kill -9 {stubborn}" in failed.output
    assert (tmp_path / "daemon.json").exists()


@pytest.mark.processes
def test_a_site_leaves_its_run_and_the_other_goes_on(call: Call, run: Run) -> None:
    alpha, beta = run.sites
    done = call("stop", "--data", beta.folder)
    try:
        assert done.exit_code == 0, done.output
        assert "has left the run and ended" in done.output
        assert f"pier-node start --data {beta.folder}" in done.output.replace("\n", "")
        assert beta.ended() == 0
        assert not (beta.folder / "daemon.json").exists()
        assert call("status", "--data", beta.folder).exit_code == 3
        alpha.reach(alpha.round + 2)
    finally:
        beta.start()
    beta.rejoin()
