"""One of Pier's programs in a process of its own, which a test may end and start again."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
from processes.place import Place

from bench.goodput_sites import HOOK, hooked

PACE = 0.02
"""Least seconds of an inner step of Pier's own trainer: sites that train leave the machine to those that start."""
BYTECODE = Path(__file__).parents[2] / ".pytest_cache" / "bytecode"
ENVIRONMENT = {
    **hooked(HOOK, PIER_BENCH_PACE=PACE),
    "COLUMNS": "200",
    "PYTHONPYCACHEPREFIX": str(BYTECODE),
    "PYTHONFAULTHANDLER": "1",
}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)


class Program:
    """A program that keeps what it knows in a folder.

    Args:
        folder: its own. Beside it lies the log, and there the program runs.
        place: where that is.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self.folder, self.place = folder, place
        self.log = folder.parent / f"{folder.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str]) -> None:
        """Run it; what it prints goes to the end of its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT, cwd=self.folder.parent
            )

    @property
    def output(self) -> str:
        """All that it printed, since its first start."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N: ended by signal N."""
        return None if self._process is None else self._process.poll()

    @property
    def daemon(self) -> psutil.Process:
        """Its process, without those that it has started."""
        assert self._process
        return psutil.Process(self.place.pid(self._process))
