"""A test that hangs ends at its deadline, and the tests after it run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

HANGING = """
import asyncio, time, pytest

@pytest.mark.timeout(1)
async def test_a_task_that_is_always_busy():
    async def busy():
        while True:
            time.sleep(0.01)
            await asyncio.sleep(0)
    task = asyncio.create_task(busy())
    await asyncio.Event().wait()

def test_the_next_one(): pass
"""

REPORTED_SLOWLY = """
import conftest, time, pytest

conftest.AGAIN = 0.2

@pytest.mark.timeout(1)
def test_that_hangs(request):
    represented = request.node.repr_failure
    def slowly(error):
        time.sleep(1)
        return represented(error)
    request.node.repr_failure = slowly
    time.sleep(60)

def test_the_next_one(): pass
"""

SLOW = """
import pytest

def seconds(request):
    marker = request.node.get_closest_marker("timeout")
    return marker.args[0] if marker else None

@pytest.mark.slow
def test_marked_itself(request): assert seconds(request) == 900

@pytest.mark.processes
def test_marked_by_its_kind(request): assert seconds(request) == 900

@pytest.mark.slow
@pytest.mark.timeout(7)
def test_with_its_own(request): assert seconds(request) == 7

def test_quick(request): assert seconds(request) is None
"""


def run(folder: Path, content: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests."""
    (folder / "test_those.py").write_text(content)
    words = [sys.executable, "-m", "pytest", "-p", "conftest", "-o", "asyncio_mode=auto", "--rootdir", "."]
    words += ["-p", "no:cacheprovider", "--assert", "plain"]  # nothing is to be written, or imported late
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_slow_test_has_more_time_whichever_way_it_is_marked(tmp_path: Path) -> None:
    done = run(tmp_path, SLOW)
    assert "4 passed" in done.stdout, done.stdout


def test_one_that_waits_for_ever_while_a_task_of_its_is_busy(tmp_path: Path) -> None:
    """The task takes the first interrupt for its own error."""
    done = run(tmp_path, HANGING)
    assert done.returncode == 1
    assert "Failed: Timeout (>1.0s) from pytest-timeout." in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_one_whose_report_takes_long_on_a_busy_machine(tmp_path: Path) -> None:
    """What interrupts a test again and again does not interrupt pytest."""
    done = run(tmp_path, REPORTED_SLOWLY)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
