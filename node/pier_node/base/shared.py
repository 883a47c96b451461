"""A vector of fp32 that the daemon and its workers both map: in anonymous shared memory, or in a file.

Memory of `memfd_create` has no name in the file system. It cannot outlive the processes that map it, and the size of
/dev/shm, which is 64 MB in a default container, does not limit it. It stays in memory as long as it is mapped, while
the kernel can write the pages of a file to the disk when it needs memory. A write to a page for which the disk has no
room would kill the process (SIGBUS), so the room is reserved first.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path
from threading import RLock
from typing import Self

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Buffer = bytes | memoryview


class Pool:
    """Reuses the memory of freed vectors: the kernel zeroes each fresh page, which costs several times an outer step.

    Kept and used memory together never exceed what was in use at one time.

    Attributes:
        spares: most vectors of about the same length that are kept.
    """

    def __init__(self, spares: int = 3) -> None:
        self.spares = spares
        self._lock = RLock()  # a vector may be freed during any of this, in any thread
        self._kept: list[tuple[int, Vector]] = []
        self._used = self._most = 0

    @property
    def kept(self) -> int:
        """Number of values that the kept memory can hold."""
        return sum(len(array) for _, array in self._kept)

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            while self._kept:
                os.close(self._kept.pop()[0])

    def take(self, length: int) -> tuple[int, Vector] | None:
        """Kept memory that is large enough for a vector, but not much larger; None if there is none."""
        with self._lock:
            fitting = [(len(array), at) for at, (_, array) in enumerate(self._kept) if _fits(array, length)]
            if not fitting:
                return None
            size, at = min(fitting)
            self._used += size
            return self._kept.pop(at)

    def add(self, length: int) -> None:
        """Note a new vector with memory of its own; free as much kept memory as is now too much, the oldest first."""
        with self._lock:
            self._used += length
            while self._kept and self._used + self.kept > self._most:
                os.close(self._kept.pop(0)[0])
            self._most = max(self._most, self._used)

    def give(self, file: int, array: Vector | None, length: int) -> None:
        """Take back the memory of a freed vector, and keep it if few of that length are kept. None cannot be kept."""
        with self._lock:
            self._used -= length
            if array is not None and sum(_fits(other, length) for _, other in self._kept) < self.spares:
                self._kept.append((file, array))
            else:
                os.close(file)


def _fits(array: Vector, length: int) -> bool:
    return length <= len(array) <= 1.25 * length


pool = Pool()
"""The pool of this process."""


class SharedVector:
    """`length` fp32 values, initially zero, which other processes of this user can map by `path` while it lives.

    Args:
        folder: holds the file with the values, which has no name and ends with the vector; None: in memory only.

    Raises:
        OSError: the disk of that folder is full.
    """

    def __init__(self, length: int, folder: Path | None = None) -> None:
        self._filed, size = folder is not None, max(4 * length, 1)
        if folder is None:
            self._fd = os.memfd_create("pier", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._fd = os.dup(file.fileno())
        self._memory = attach(self.path, length)
        self.array = self._memory[:length]
        if not self._filed:
            pool.add(length)

    @classmethod
    def scratch(cls, length: int) -> Self:
        """A vector with arbitrary contents, for callers that overwrite all of it: see Pool."""
        if (spare := pool.take(length)) is None:
            return cls(length)
        vector = cls.__new__(cls)
        vector._filed, (vector._fd, vector._memory) = False, spare
        vector.array = vector._memory[:length]
        return vector

    @property
    def path(self) -> str:
        """The path at which other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def __del__(self) -> None:
        if not hasattr(self, "array") or sys is None or sys.is_finalizing():  # at exit, modules are cleared
            return
        if self._filed:
            os.close(self._fd)
            return
        # An attribute and the argument refer to each, and the array to the memory: no other view of it is left.
        unseen = sys.getrefcount(self._memory) == 3 and sys.getrefcount(self.array) == 2
        pool.give(self._fd, self._memory if unseen else None, len(self._memory))


def attach(path: str, length: int) -> Vector:
    """Map a SharedVector of another process: shape [length]. Its memory is freed with the returned array."""
    with open(path, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), max(4 * length, 1))
    return np.frombuffer(memory, dtype=np.float32, count=length)
