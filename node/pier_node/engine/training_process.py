"""Tends the command that trains at a site: starts it, starts it again when it dies, and ends it within seconds."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from pier_node.base.errors import PierError
from pier_node.base.units import printable

ENGINE_VARIABLE = "PIER_ENGINE"
"""Environment variable that tells a program where its daemon listens."""
PROGRAM_VARIABLE = "PIER_PROGRAM"
"""Environment variable that tells a daemon the process id of the program that has started it."""
RESTART_SECONDS = 1.0
MAX_RESTARTS = 3
"""A program that dies more often than this without finishing its inner steps is not started again."""
GIVE_UP_SECONDS = 3.0
"""What a program that has died too often gets to end by itself, and then on SIGTERM."""
LOG_BYTES = 16 << 20
"""A log that is longer when a program starts is set aside, in place of the one before it."""
TAIL_BYTES = 3000
"""Bytes of the log that an error message shows."""
LINE = 300
"""Characters of the log's last line that a warning shows."""

log = logging.getLogger(__name__)


class Child:
    """A program that runs, in a session of its own: Ctrl+C in the daemon's terminal is the daemon's to decide about.

    It does not outlive this process. Raises OSError or ValueError: it cannot be started.

    Args:
        words: the program and its arguments.
        log: file for its output; None: this process's own.
        environment: its variables; None: it waits for them on stdin, as a line of JSON, until `tell`.
    """

    def __init__(self, words: Sequence[str], log: Path | None, environment: Mapping[str, str] | None) -> None:
        program, *rest = words
        if (path := shutil.which(program)) is None:
            raise FileNotFoundError(errno.ENOENT, "no such program, or it cannot be executed", program)
        self._waits = environment is None
        with ExitStack() as stack:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                if log.exists() and log.stat().st_size > LOG_BYTES:
                    log.replace(log.with_suffix(".old.log"))
                output = stack.enter_context(log.open("ab"))
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "pier_node.base.processes", path, *rest],
                stdin=subprocess.PIPE if self._waits else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def waits(self) -> bool:
        """Whether it waits for its variables."""
        return self._waits and self.code is None

    @property
    def code(self) -> int | None:
        """Its exit code, -N: ended by signal N; None: it runs."""
        return self._popen.poll()

    def tell(self, environment: Mapping[str, str]) -> None:
        """Give it the variables that it waits for; without any it ends."""
        self._waits = False
        assert self._popen.stdin
        with suppress(BrokenPipeError), self._popen.stdin as pipe:  # it has died: `wait` tells
            pipe.write(json.dumps(dict(environment)).encode() if environment else b"")

    def terminate(self) -> None:
        """Send it SIGTERM, if it still runs."""
        self._popen.terminate()

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self.code is None:
            ended, handle = asyncio.Event(), os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                asyncio.get_running_loop().remove_reader(handle)
                os.close(handle)
        return self._popen.wait()


@dataclass(frozen=True)
class Command:
    """How a training program is started.

    Attributes:
        words: the program and its arguments.
        environment: variables besides those of the daemon.
        log: file for its output; None: the daemon's own.
        early: a process of it that runs already and waits for its environment.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    early: Child | None = None

    def start(self, socket: Path) -> Child:
        """Start it for a daemon that listens there. Raises OSError or ValueError."""
        environment = {**self.environment, ENGINE_VARIABLE: str(socket)}
        if self.early and self.early.waits:
            self.early.tell(environment)
            return self.early
        return Child(self.words, self.log, environment)

    @classmethod
    def parse(cls, line: str) -> Self:
        """The command in a line as a shell would read it. Raises PierError."""
        try:
            words = tuple(shlex.split(line))
        except ValueError as error:
            raise _not_runnable(line, error) from error
        if not words:
            raise _not_runnable(line, ValueError("there is no command"))
        return cls(words)

    def explained(self, problem: str, remedy: str) -> PierError:
        """An error with the end of the log, or with `remedy` if the output is not in a log."""
        if self.log is None:
            return PierError(problem, remedy)
        return PierError(
            f"{problem}; {self.log} ends with:\n{_tail(self.log)}", "Mend what it shows, then start the node again."
        )

    @property
    def last_words(self) -> str:
        """A sentence with the log and its last line; "" if the output is not in a log."""
        if self.log is None:
            return ""
        lines = _tail(self.log).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{self.log} ends with: {printable(last[-LINE:])}" if last else f"{self.log} says nothing"


def _tail(file: Path) -> str:
    """The end of a log; "" if there is none."""
    if not file.exists():
        return ""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return content.read(TAIL_BYTES).decode(errors="replace")


def _not_runnable(line: str, error: Exception) -> PierError:
    return PierError(f"--exec: {line}: {error}", "Give a command that can be run here.")


class TrainingProcess:
    """A command that trains, and that is started again when it dies.

    A program may also restart what trains in it (torchrun, Pier's own launcher): it has died then as well, which its
    daemon sees by the lost connection.

    Args:
        socket: where the daemon listens.
        fail: called with the error when the command cannot be started, or has died too often.
        may_end: called when the command has ended with exit code 0; returns whether it is not started again.

    Attributes:
        over: the command may end: it is not started again.
    """

    def __init__(
        self,
        command: Command,
        socket: Path,
        fail: Callable[[PierError], None],
        may_end: Callable[[], Awaitable[bool]],
    ) -> None:
        self.command, self._socket, self._fail, self._may_end = command, socket, fail, may_end
        self.over = False
        self._deaths, self._alive, self._came = 0, False, False
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the command, and start it again whenever it ends."""
        self._keeping = asyncio.create_task(self._keep_running())

    def came(self) -> None:
        """What trains has connected."""
        self._alive = self._came = True

    def progressed(self) -> None:
        """It has finished inner steps: deaths before count no more."""
        self._deaths = 0

    def died(self) -> None:
        """The command has ended, or what trains has left the daemon alone; each death counts once."""
        if not self._alive or self.over:
            return
        self._alive, self._deaths = False, self._deaths + 1
        if self._deaths > MAX_RESTARTS and self._child is not None:
            self._ending = asyncio.create_task(end(self._child, GIVE_UP_SECONDS))

    async def restart(self, patience: float) -> None:
        """End the command, which is then started again; see `end`."""
        if self._child is not None:
            self._ending = asyncio.create_task(end(self._child, patience))
            await asyncio.shield(self._ending)

    async def ended(self, patience: float) -> None:
        """Return when the command has ended by itself, or after `patience` seconds."""
        if self._child is not None and self._child.code is None:
            await _ended(self._child, patience)

    async def stop(self, patience: float) -> None:
        """End the command for good; see `end`."""
        self.over = True
        if self._keeping is not None:
            self._keeping.cancel()
        if self._child is not None:
            await end(self._child, patience)

    async def _keep_running(self) -> None:
        while True:
            try:
                self._child = self.command.start(self._socket)
            except (OSError, ValueError) as error:
                self._fail(_not_runnable(shlex.join(self.command.words), error))
                return
            self._alive, self._came = True, False
            code = await self._child.wait()
            if self.over or (code == 0 and await self._may_end()):
                return
            self.died()
            if problem := self._no_use(code):
                words = shlex.join(self.command.words)
                self._fail(self.command.explained(problem, f"Its output may say why. It was started as: {words}"))
                return
            again = f"the training program ended with exit code {code}; it is started again"
            log.warning(". ".join(filter(None, (again, self.command.last_words))))
            await asyncio.sleep(RESTART_SECONDS)

    def _no_use(self, code: int) -> str:
        """Why it is not started again; "": it is."""
        if code == 0 and not self._came:
            return "the training program ended, with exit code 0, without having called pier.join"
        return f"the training program ends again and again (exit code {code})" if self._deaths > MAX_RESTARTS else ""


async def end(child: Child, patience: float) -> None:
    """End a child: let it end by itself, then send SIGTERM, then SIGKILL to it and its descendants.

    Args:
        patience: seconds that each of the first two steps may take.
    """
    family = _family(child.pid) if child.code is None else []
    if not await _ended(child, patience):
        child.terminate()
        await _ended(child, patience)
    for relative in family:
        with suppress(psutil.NoSuchProcess):
            relative.kill()
    await child.wait()


async def _ended(child: Child, patience: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), patience)
    return child.code is not None


def _family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, also those in sessions of their own, as torchrun's workers are."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []
