"""A vector of fp32 in anonymous shared memory: where the daemon and its workers meet.

Memory of `memfd_create` has no name in the file system: it cannot outlive the processes that map it, and it is not
bounded by the size of /dev/shm, which is 64 MB in a default container.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


class SharedVector:
    """`length` fp32 values that other processes of this user can map by `path` while this object lives."""

    def __init__(self, length: int) -> None:
        self._fd = os.memfd_create("pier", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(4 * length, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.array = attach(self.path, length)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def attach(path: str, length: int) -> Vector:
    """Map a SharedVector of another process: shape [length]. Its memory is freed with the returned array."""
    with open(path, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), max(4 * length, 1))
    return np.frombuffer(memory, dtype=np.float32, count=length)
