"""The ranks of a program as its daemon sees them: which of them have died, have stopped or are behind, and where.

Every rank on the daemon's machine writes its process id and the number of its steps to a shared table. Only rank 0
talks to the daemon; when it is silent, the table says who holds it up, as far as that can be known from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

import psutil

from pier_node.base.shared import SharedVector, Vector, attach

PID, STEPS, DUMPS, COLUMNS = 0, 1, 2, 3
"""Columns of the table, one row a rank, in fp32, which is exact for whole numbers up to 16,777,216."""
DUMP_SIGNAL = signal.SIGUSR2
"""Has a rank print where each of its threads is, if the program has no use of its own for the signal."""


def enter(path: str, count: int, rank: int) -> Vector:
    """This rank's row of the table at `path`, which has one for each of `count` ranks."""
    row: Vector = attach(path, count * COLUMNS).reshape(count, COLUMNS)[rank]
    row[:] = os.getpid(), 0, _register_dump()
    return row


def _register_dump() -> bool:
    """Have the signal print where the threads are. Returns whether it does."""
    if signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL or sys.__stderr__ is None:
        return False
    with contextlib.suppress(OSError, ValueError):  # a stderr without a file
        faulthandler.register(DUMP_SIGNAL, file=sys.__stderr__)
        return True
    return False


class RankTable:
    """The daemon's end of the table, for a program of `count` ranks.

    Attributes:
        path: by which the ranks find it.
    """

    def __init__(self, count: int) -> None:
        self._vector = SharedVector(count * COLUMNS)
        self._rows = self._vector.array.reshape(count, COLUMNS)
        self.path = self._vector.path

    def dead(self, first: int = 0) -> list[str]:
        """The ranks, from `first` on, whose processes have ended, in words. Those of other machines cannot be seen."""
        return [f"{who} has died" for who, state in self._states()[first:] if state == psutil.STATUS_DEAD]

    @property
    def speaker_died(self) -> bool:
        """Whether the process of rank 0, which talks to the daemon, has ended."""
        return any(_state(int(pid)) == psutil.STATUS_DEAD for pid in self._rows[:1, PID] if pid)

    def suspects(self) -> str:
        """Who holds the program up, in words."""
        wrong = self.dead() + [f"{who} is stopped" for who, state in self._states() if state == psutil.STATUS_STOPPED]
        if wrong:
            return ", ".join(wrong)
        here = [rank for rank in range(len(self._rows)) if self._rows[rank, PID]]
        steps = {rank: int(self._rows[rank, STEPS]) for rank in here}
        most = max(steps.values(), default=0)
        behind = [f"{self._called(rank)} has done {steps[rank]} of {most} steps" for rank in here if steps[rank] < most]
        if behind:
            return ", ".join(behind)
        return f"it is in its step {most + 1}" + (f", with all {len(here)} ranks" if len(here) > 1 else "")

    def dump(self) -> None:
        """Have every rank print where its threads are, to its own stderr."""
        for pid, _, dumps in self._rows:
            if pid and dumps:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), DUMP_SIGNAL)

    def _called(self, rank: int) -> str:
        return f"rank {rank} (process {int(self._rows[rank, PID])})"

    def _states(self) -> list[tuple[str, str]]:
        return [(self._called(rank), _state(int(row[PID]))) for rank, row in enumerate(self._rows) if row[PID]]


def _state(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        if process.memory_info().vms:
            return str(process.status())
    except psutil.NoSuchProcess:
        pass
    return str(psutil.STATUS_DEAD)  # one that is ending has no memory before its connections close
