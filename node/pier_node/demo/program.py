"""A program that the demo runs: started as a user would start it, logged to a file, and always ended."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import psutil

from pier_node.rounds.folder import DAEMON_FILE

TAIL_LINES = 15


class Program:
    """One of Pier's commands, with its folder and its log next to each other.

    Args:
        work: the demo's folder.
        threads: number of threads for each of its processes.
    """

    def __init__(self, work: Path, name: str, threads: int) -> None:
        self.name = name
        self.folder, self.log = work / name, work / f"{name}.log"
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None

    @property
    def started(self) -> bool:
        """Whether `run` was called."""
        return self._process is not None

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.returncode if self._process else None

    async def run(self, program: str, *words: str) -> None:
        """Start it."""
        plain = {"COLUMNS": "160", "NO_COLOR": "1", "OMP_NUM_THREADS": str(self._threads)}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pier_node.base.processes"),  # a fork here would disturb the threads of gRPC
                *(str(Path(sysconfig.get_path("scripts")) / program), *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plain},
                start_new_session=True,  # the demo decides about Ctrl+C
            )

    def told(self) -> dict[str, Any]:
        """The content of its daemon.json; {}: nothing yet."""
        try:
            known = json.loads((self.folder / DAEMON_FILE).read_text())
        except FileNotFoundError:
            return {}
        return dict(known) if self._process and known["pid"] == self._process.pid else {}

    def http(self) -> str | None:
        """Its HTTP address on this machine; None: not yet."""
        return self.told().get("http")

    def terminate(self) -> None:
        """Ask it to leave; the second time, to end at once."""
        if self._process and self.running:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it; the processes that it started end with it."""
        if self._process and self.running:
            self._process.kill()

    async def ended(self) -> None:
        """Return when it has ended."""
        if self._process:
            await self._process.wait()

    def family(self) -> list[psutil.Process]:
        """The processes that it started."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True) if self._process and self.running else []
        except psutil.NoSuchProcess:
            return []

    @property
    def obituary(self) -> str:
        """A message that it has ended, and how."""
        return f"site {self.name} ended with exit code {self.code}; {self.log} ends with:\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line.rstrip() for line in lines[-TAIL_LINES:])
