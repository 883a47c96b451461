"""A vector of fp32 in shared memory, which the daemon and its workers both map: anonymous, or of a file.

Memory of `memfd_create` has no name in the file system: it cannot outlive the processes that map it, and the size of
/dev/shm, which is 64 MB in a default container, does not limit it. It stays in memory as long as it is mapped. The
pages of a file the kernel writes to the disk and takes back when it needs memory. A write to a page that the disk has
no room for would kill the process (SIGBUS), so the room is reserved first.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Buffer = bytes | memoryview


class SharedVector:
    """`length` fp32 values, initially zero, which other processes of this user can map by `path` while it lives.

    Args:
        folder: of the file that the values are in, which has no name and goes with the vector; None: in memory only.

    Raises:
        OSError: the disk of that folder is full.
    """

    SPARES: ClassVar[int] = 3
    """Number of vectors of each length that are kept for `scratch`."""
    _spares: ClassVar[dict[int, list[tuple[int, Vector]]]] = defaultdict(list)

    def __init__(self, length: int, folder: Path | None = None) -> None:
        self._filed, size = folder is not None, max(4 * length, 1)
        if folder is None:
            self._fd = os.memfd_create("pier", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._fd = os.dup(file.fileno())
        self.array = attach(self.path, length)

    @classmethod
    def scratch(cls, length: int) -> Self:
        """A vector with arbitrary contents, for callers that overwrite all of it.

        It reuses the memory of a vector that is no longer in use, if there is one: the kernel must zero a fresh page
        first, which costs several times as much as an outer step.
        """
        try:
            spare = cls._spares[length].pop()
        except IndexError:
            return cls(length)
        vector = cls.__new__(cls)
        vector._filed, (vector._fd, vector.array) = False, spare
        return vector

    @property
    def path(self) -> str:
        """The path at which other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def __del__(self) -> None:
        if not hasattr(self, "array") or sys is None or sys.is_finalizing():  # at exit, modules lose their names
            return
        spares = self._spares[len(self.array)]
        unseen = sys.getrefcount(self.array) == 2  # this attribute and the argument: no view is left
        if unseen and not self._filed and len(spares) < self.SPARES:
            spares.append((self._fd, self.array))
        else:
            os.close(self._fd)


def attach(path: str, length: int) -> Vector:
    """Map a SharedVector of another process: shape [length]. Its memory is freed with the returned array."""
    with open(path, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), max(4 * length, 1))
    return np.frombuffer(memory, dtype=np.float32, count=length)
