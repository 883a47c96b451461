from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from commands.conftest import CONFIG
from processes.program import ENVIRONMENT
from processes.run import Run
from processes.site import PROGRAM

from pier_node.base.errors import PierError
from pier_node.commands import daemon
from pier_node.site.running import Status

Call = Callable[..., Result]


def test_a_site_that_does_not_run_says_what_it_has(call: Call, site: Path) -> None:
    done = call("status", "--data", site)
    assert done.exit_code == 3
    assert "No daemon runs" in done.output
    assert "round 3 of 10" in done.output
    assert "pier-node start --data" in done.output


def test_scripts_read_the_same(call: Call, site: Path) -> None:
    done = call("status", "--data", site, "--json")
    found = json.loads(done.output)
    assert done.exit_code == 3
    assert (found["running"], found["round"], found["run_hash"]) == (False, 3, CONFIG.hash().hex())


def test_a_damaged_run_json_is_an_error_with_a_remedy(call: Call, site: Path) -> None:
    (site / "run.json").write_text("{}}")
    failed = call("status", "--data", site)
    assert failed.exit_code == 1
    assert failed.output.startswith("Error: ")


@pytest.mark.processes
def test_a_running_site_and_its_peer(call: Call, run: Run) -> None:
    alpha, beta = run.sites
    done = call("status", "--data", alpha.folder, "--json")
    found = json.loads(done.output)
    assert done.exit_code == 0
    assert (found["running"], found["node"], found["address"]) == (True, alpha.node, alpha.address)
    assert [(peer["node"], peer["alive"]) for peer in found["peers"]] == [(beta.node, True)]
    table = call("status", "--data", alpha.folder)
    assert table.exit_code == 0
    assert f"alpha ({alpha.node}) at {alpha.address}" in table.output
    assert "beta" in table.output.partition("same state")[2]


class Daemon:
    """Answers, is too busy to answer, answers, and ends."""

    def __init__(self) -> None:
        self.answers: list[Status | PierError] = [{"round": 1}, PierError("the daemon is busy"), {"round": 2}]

    def find(self, folder: Path) -> Daemon | None:
        return self if self.answers else None

    def status(self) -> Status:
        answer = self.answers.pop(0)
        if isinstance(answer, PierError):
            raise answer
        return answer


def test_watching_outlasts_a_daemon_that_is_too_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "find_daemon", Daemon().find)
    monkeypatch.setattr(daemon, "EVERY", 0)
    assert daemon.status(tmp_path, as_json=True, watch=True) == daemon.NOT_RUNNING
    shown = capsys.readouterr()
    assert [json.loads(line).get("round") for line in shown.out.splitlines()[:2]] == [1, 2]
    assert shown.err == "the daemon is busy\n"


@pytest.mark.processes
def test_watching_goes_on_until_ctrl_c(run: Run) -> None:
    words = [str(PROGRAM), "status", "--data", str(run.sites[1].folder), "--watch", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as watching:
        assert watching.stdout
        first, second = (json.loads(watching.stdout.readline()) for _ in range(2))
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60)
    assert watching.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
    assert second["tokens"] >= first["tokens"] > 0
