"""Child processes that end with their parent, folders for Unix sockets, and how long PyTorch's threads spin.

`python -m pier_node.base.processes PROGRAM ARGUMENT...` runs a program that does not outlive the process that started
it. `answer` runs one of Pier's modules as its own program, which ends with the task that waits for its answer.

SocketFolder makes folders in /tmp, because the path of a socket has at most 107 bytes, and for this user alone. Each
folder has a file that is locked as long as its process lives. Making a folder removes all folders without a lock: their
processes were killed before they could remove them.

`spin_little` must be called before PyTorch is loaded. By default its threads spin for long while they wait for one
another, and so delay each other when another program wants a core: an answer of six experts took 14.2 s beside one busy
process on two cores, 3.9 s without it. If they never spin, each small operation waits for threads to wake: 4.4 s, but a
training step takes a fifth to a third longer on a quiet machine. If they spin briefly: 4.1 s, and training is slower
only beside the busy process, by a fifth.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux, prctl(2))."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def call_process(name: str) -> None:
    """Give this process a name of at most 15 characters, for people who look at a machine's processes."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def ticks_of(pid: int) -> int:
    """When a process began, in ticks since the machine did (proc(5)), which no clock changes. Raises OSError."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@dataclass(frozen=True)
class Answer:
    """What a program wrote to stdout and stderr, and its exit code."""

    output: bytes
    errors: str
    code: int


async def answer(module: str, *words: str, stdin: bytes = b"", within: float | None = None, **how: Any) -> Answer:
    """Run `python -m module words`.

    Args:
        within: limit in seconds; None for no limit.
        how: further arguments of asyncio.create_subprocess_exec.

    Raises:
        TimeoutError: it took longer; this is also an OSError.
        OSError: it cannot be started.
    """
    pipe, program = asyncio.subprocess.PIPE, (sys.executable, "-m", module, *words)
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe, **how)
    try:
        async with asyncio.timeout(within):
            output, errors = await process.communicate(stdin)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # until its pipes are closed, too: the loop may be about to end
    return Answer(output, errors.decode(errors="replace"), await process.wait())


TEMPORARY = Path("/tmp")
LOCK = "lock"


class SocketFolder:
    """A new socket folder of this process.

    Args:
        kind: what the folder holds; part of its name.
    """

    def __init__(self, kind: str) -> None:
        _tidy_up()
        self.path = Path(tempfile.mkdtemp(prefix=f"pier-{kind}-", dir=TEMPORARY))
        making = self.path / "making"
        self._lock = making.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        making.rename(self.path / LOCK)  # locked before any other process can see it

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)  # another process may be removing it too
        self._lock.close()


def _tidy_up() -> None:
    for lock in TEMPORARY.glob(f"pier-*/{LOCK}"):
        with suppress(OSError), lock.open("rb") as file:  # in use, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def spin_little() -> None:
    """Make PyTorch's threads spin briefly, unless the environment says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # GNU's library looks only at this


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
