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


def test_one_that_waits_for_ever_while_a_task_of_its_is_busy(tmp_path: Path) -> None:
    """The task takes the first interrupt for its own error."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    words = [sys.executable, "-m", "pytest", "-p", "conftest", "-o", "asyncio_mode=auto", "--rootdir", "."]
    words += ["-p", "no:cacheprovider", "--assert", "plain"]  # nothing is to be written, or imported late
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Failed: Timeout (>1.0s) from pytest-timeout." in done.stdout
    assert "1 failed, 1 passed" in done.stdout
