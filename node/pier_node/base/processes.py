"""How long PyTorch's threads spin while they wait for one another; to be said before PyTorch is loaded.

For long, as is their default, they keep each other waiting where another program wants a core: an answer of six experts
took 14.2 s beside one busy process on two cores, 3.9 s without. Never, and each small operation waits for threads to
wake: 4.4 s, but a training step takes a fifth to a third longer on a quiet machine. After a little: 4.1 s, and training
is slower only beside the busy process, by a fifth.

A process that does not outlive the one that started it: `python -m pier_node.base.processes PROGRAM ARGUMENT...`.

A module of Pier's run as a program of its own, which ends with whoever waits for its answer.

Folders for Unix sockets: in /tmp, for a socket's path has 107 bytes at most, and for this user alone.

Each has a file that is locked for as long as its process lives. Whoever makes one removes those without: their
processes were killed, and could not.
"""

from __future__ import annotations

import asyncio
import contextlib
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


def call_process(name: str) -> None:
    """Give this process a name of at most 15 letters, for whoever looks at the processes of a machine."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@dataclass(frozen=True)
class Answer:
    """What a program wrote to stdout, said on stderr, and ended with."""

    output: bytes
    errors: str
    code: int


async def answer(module: str, *words: str, stdin: bytes = b"", within: float | None = None, **how: Any) -> Answer:
    """Run `python -m module words`.

    Args:
        within: seconds; None: as long as it takes.
        how: more for asyncio.create_subprocess_exec.

    Raises:
        TimeoutError: it took longer; an OSError, too.
        OSError: it cannot be started.
    """
    pipe, program = asyncio.subprocess.PIPE, (sys.executable, "-m", module, *words)
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe, **how)
    try:
        async with asyncio.timeout(within):
            output, errors = await process.communicate(stdin)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
    return Answer(output, errors.decode(errors="replace"), code)


TEMPORARY = Path("/tmp")
LOCK = "lock"


class SocketFolder:
    """A new one, of this process.

    Args:
        kind: what is in it, for its name.
    """

    def __init__(self, kind: str) -> None:
        _tidy_up()
        self.path = Path(tempfile.mkdtemp(prefix=f"pier-{kind}-", dir=TEMPORARY))
        making = self.path / "making"
        self._lock = making.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        making.rename(self.path / LOCK)  # locked before anybody can see it

    def remove(self) -> None:
        """Remove it and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)  # of another tidy-up, perhaps
        self._lock.close()


def _tidy_up() -> None:
    for lock in TEMPORARY.glob(f"pier-*/{LOCK}"):
        with suppress(OSError), lock.open("rb") as file:  # in use; or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def spin_little() -> None:
    """Unless the environment says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # GNU's library goes by this alone


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
