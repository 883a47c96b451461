from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pier_node.demo.sites import WORKER, throttle
from pier_node.trainer import launch

BUSY = "from pier_node.base.processes import call_process; call_process('{}'); print(flush=True)\nwhile True: pass"


class Family:
    """A program and what it has started."""

    def __init__(self, *processes: subprocess.Popen[bytes]) -> None:
        self._family = [psutil.Process(process.pid) for process in processes]

    def family(self) -> list[psutil.Process]:
        return self._family


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A worker, and another process."""
    names = (WORKER, "other")
    made = [subprocess.Popen([sys.executable, "-c", BUSY.format(name)], stdout=subprocess.PIPE) for name in names]
    for process in made:
        assert process.stdout
        process.stdout.readline()
    yield made
    for process in made:
        process.kill()
        process.communicate()


def test_workers_are_called_so() -> None:
    assert launch.WORKER == WORKER


async def test_workers_are_stopped_now_and_then_and_nobody_else(processes: list[subprocess.Popen[bytes]]) -> None:
    worker, other = (psutil.Process(process.pid) for process in processes)
    seen: set[tuple[str, bool]] = set()
    slow = asyncio.create_task(throttle(Family(*processes), 0.5))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while not {("worker", True), ("worker", False)} <= seen:
            await asyncio.sleep(0.02)
            seen |= {("worker", worker.status() == psutil.STATUS_STOPPED)}
            seen |= {("other", other.status() == psutil.STATUS_STOPPED)}
    slow.cancel()
    await asyncio.wait([slow])
    assert worker.status() != psutil.STATUS_STOPPED
    assert ("other", True) not in seen


async def test_a_worker_that_is_gone_is_no_error(processes: list[subprocess.Popen[bytes]]) -> None:
    slow = asyncio.create_task(throttle(Family(*processes), 0.5))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    processes[0].kill()
    processes[0].wait()
    done, _ = await asyncio.wait([slow], timeout=0.5)
    assert not done
    slow.cancel()
    await asyncio.wait([slow])
