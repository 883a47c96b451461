"""Makes a site of the demo slow: its workers are stopped for a part of each moment (SIGSTOP, SIGCONT).

Sites on one machine are equally fast otherwise. Nothing in the site knows of it, so that what it measures is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable

import psutil

from pier_node.demo.program import Program

PERIOD = 0.2
"""Seconds in which a worker runs and is stopped once."""
WORKER = "pier-worker"
"""As inner/launch.py calls it, which imports torch."""


async def throttle(program: Program, share: float) -> None:
    """Let the workers of a program run for `share` of the time, until cancelled; then they go on."""
    stopped: list[psutil.Process] = []
    try:
        while True:
            workers = await asyncio.to_thread(_workers, program)
            stopped = workers
            _send(workers, signal.SIGSTOP)
            await asyncio.sleep(PERIOD * (1 - share))
            _send(workers, signal.SIGCONT)
            await asyncio.sleep(PERIOD * share)
    finally:
        _send(stopped, signal.SIGCONT)


def _workers(program: Program) -> list[psutil.Process]:
    found = []
    for process in program.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == WORKER:
                found.append(process)
    return found


def _send(workers: Iterable[psutil.Process], number: signal.Signals) -> None:
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
