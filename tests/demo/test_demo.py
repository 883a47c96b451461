"""The whole of it, as a person starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pier_node.outer.layout import Layout
from pier_node.rounds.folder import DAEMON_FILE, EVENTS_FILE, read_events
from pier_node.trainer.model.export import import_weights

pytestmark = pytest.mark.processes

PATIENCE = 300.0
MARK = "PIER_DEMO_TEST"


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    program = Path(sysconfig.get_path("scripts")) / "pier-node"
    command = [str(program), "demo", "--folder", str(folder), *options]
    environment = {**os.environ, MARK: str(folder)}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def descendants(folder: Path) -> list[psutil.Process]:
    """Every process that a demo in this folder has started, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def sockets(processes: list[psutil.Process]) -> set[Path]:
    """The folders of the sockets between daemons and workers."""
    words = [Path(word) for process in processes if process.is_running() for word in process.cmdline()]
    return {word.parent for word in words if word.name == "socket"}


def wait_until(seen: Callable[[], bool], demo: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not seen():
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.smoke
def test_two_sites_train_one_model(tmp_path: Path) -> None:
    demo = start(tmp_path, "--sites", "2", "--steps", "30", "--json")
    output, errors = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 0, errors
    assert descendants(tmp_path) == []
    result = json.loads(output)
    assert result["final_loss"] < 0.8 * result["initial_loss"]
    assert result["initial_loss"] > 5.0
    assert result["digests_equal"]
    assert result["rounds_compared"] >= result["rounds"] - 1 == 5
    assert len({site["digest"] for site in result["sites"]}) == 1
    assert [site["finished"] for site in result["sites"]] == [True, True]
    # A round's payload is 4 bytes a parameter, once for the sums and once for the means, by each of two: 4 P in all.
    joiner = min(site["bytes_sent"] for site in result["sites"])  # the other gave it the first state
    assert 5 * 4 * result["parameters"] <= joiner < 1.2 * 5 * 4 * result["parameters"]
    assert result["text"].startswith("def ")
    assert len(result["text"]) > 200
    assert Path(result["plot"]).read_bytes().startswith(b"\x89PNG")
    config, weights = import_weights(Path(result["export"]))
    assert len(weights) == Layout.of(config).length == result["parameters"]
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_three_sites_train_in_pairs(tmp_path: Path) -> None:
    demo = start(tmp_path, "--algorithm", "noloco", "--steps", "40", "--json")
    output, errors = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 0, errors
    result = json.loads(output)
    assert (result["algorithm"], result["digests_equal"]) == ("noloco", True)
    assert result["final_loss"] < 0.8 * result["initial_loss"]
    assert result["spread"] > 0
    assert len({site["digest"] for site in result["sites"]}) == 3
    assert [site["finished"] for site in result["sites"]] == [True, True, True]
    assert result["validation"][0][0] == 0
    assert result["validation"][-1][0] == 40


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda folder: (folder / "alpha.log").exists(), id="the founder starts"),
        pytest.param(lambda folder: (folder / "gamma" / DAEMON_FILE).exists(), id="the others start"),
        pytest.param(lambda folder: _round(folder, "gamma") >= 2, id="all train"),
    ],
)
def test_an_interrupt_leaves_nothing(tmp_path: Path, moment: Callable[[Path], bool]) -> None:
    demo = start(tmp_path, "--steps", "200")
    try:
        wait_until(lambda: moment(tmp_path), demo)
        homes = sockets(descendants(tmp_path))
        demo.send_signal(signal.SIGINT)
        output, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130, output + errors
    assert "no process is left" in errors
    assert descendants(tmp_path) == []
    assert not [home for home in homes if home.exists()]


def test_an_interrupted_demo_goes_on_where_it_was(tmp_path: Path) -> None:
    first = start(tmp_path, "--sites", "2", "--steps", "60")
    wait_until(lambda: _round(tmp_path, "beta") >= 2, first)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    second = start(tmp_path, "--keep", "--json")
    output, errors = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, errors
    result = json.loads(output)
    assert result["steps"] == 60
    assert result["digests_equal"]
    assert result["rounds_compared"] >= 2  # of those between, the founder may have made some alone: it is half of two
    assert [step for step, _ in result["validation"]] == list(range(0, 61, 10))
    assert re.search(r"Resuming at round [1-9] as alpha", (tmp_path / "alpha.log").read_text())
    # Bytes are counted on: 4 P a round that both took part in, before the end and after.
    exchanged = 4 * result["parameters"] * result["rounds_compared"]
    assert exchanged <= min(site["bytes_sent"] for site in result["sites"]) < 1.5 * exchanged


def test_the_others_go_on_without_a_site_that_was_killed_and_it_is_told(tmp_path: Path) -> None:
    demo = start(tmp_path, "--steps", "60", "--json")
    wait_until(lambda: _round(tmp_path, "beta") >= 2, demo)
    psutil.Process(json.loads((tmp_path / "beta" / DAEMON_FILE).read_text())["pid"]).kill()
    output, errors = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 1
    assert "site beta ended with exit code -9" in errors
    assert re.search("Starting at round [01] as beta", errors)  # from its log; any site may found the run
    result = json.loads(output)
    assert [site["exit_code"] for site in result["sites"]] == [0, -9, 0]
    assert [site["finished"] for site in result["sites"]] == [True, False, True]
    assert descendants(tmp_path) == []


def test_a_demo_that_was_killed_takes_its_sites_along(tmp_path: Path) -> None:
    demo = start(tmp_path, "--sites", "2", "--steps", "200")
    wait_until(lambda: (tmp_path / "beta" / DAEMON_FILE).exists(), demo)
    demo.kill()
    demo.communicate()
    while family := descendants(tmp_path):  # one may just be starting another
        assert psutil.wait_procs(family, timeout=60)[1] == []


def _round(folder: Path, name: str) -> int:
    path = folder / name / EVENTS_FILE
    events = read_events(path.read_bytes() if path.exists() else b"")
    return int(events[-1]["round"]) if events else -1
