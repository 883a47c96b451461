"""A process that does not outlive the one that started it: `python -m pier_node.inner.parent PROGRAM ARGUMENT...`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])
