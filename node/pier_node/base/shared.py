"""A vector of fp32 that the daemon and its workers both map: in anonymous shared memory, or in a file.

Memory of `memfd_create` has no name in the file system. It cannot outlive the processes that map it, and the size of
/dev/shm, which is 64 MB in a default container, does not limit it. It stays in memory as long as it is mapped, while
the kernel can write the pages of a file to the disk when it needs memory. A write to a page for which the disk has no
room would kill the process (SIGBUS), so the room is reserved first.

The kernel takes about 0.7 s to free a GB, so large memory is freed in a thread, where that holds up no event loop.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, RLock, Thread
from typing import Self

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Buffer = bytes | memoryview


LARGE = 1 << 22
"""Number of values from which memory is large: to free it takes about 10 ms."""
PIECE = 1 << 24
"""Bytes of it that are unmapped at once, which takes 3 ms."""


class Memory:
    """Shared memory that this process maps."""

    def __init__(self, file: int, length: int) -> None:
        self._file = file
        self._mapped = _map(self.path, length)
        self.array = _values(self._mapped, length)
        if length >= LARGE:
            _freer.start()

    @property
    def path(self) -> str:
        """The path at which other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def free(self) -> None:
        """Free it, unless something else still maps or views it."""
        # All of this releases the interpreter's lock. But no other thread can map memory while the kernel unmaps pages,
        # for 100 ms if there are 800 MB of them, so the pages go first, by pieces. To truncate the file would free them
        # faster, but another process that still maps them would be killed.
        for start in range(0, len(self._mapped), PIECE):
            self._mapped.madvise(mmap.MADV_DONTNEED, start, PIECE)
        os.close(self._file)
        del self.array, self._mapped


class Freer:
    """Frees large memory in a thread, and other memory at once."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Memory] = SimpleQueue()
        self._thread = Thread()
        self._lock = Lock()

    def start(self) -> None:
        """Start the thread unless it runs. A forked process has none until it makes large memory of its own."""
        with self._lock:
            if not self._thread.is_alive():
                self._thread = Thread(target=self._free_all, name="pier-memory", daemon=True)
                self._thread.start()

    def free(self, memory: Memory) -> None:
        """Free memory of which the caller keeps no view, or it is freed there."""
        # A vector may be freed during any of this, in any thread. That is what SimpleQueue is for.
        if len(memory.array) >= LARGE and self._thread.is_alive():
            self._waiting.put(memory)
        else:
            memory.free()

    def _free_all(self) -> None:
        while True:
            self._waiting.get().free()


_freer = Freer()


class Pool:
    """Reuses the memory of freed vectors: the kernel zeroes each fresh page, which costs several times an outer step.

    Kept and used memory together never exceed what was in use at one time. Memory that waits to be freed is neither.

    Attributes:
        spares: most vectors of about the same length that are kept.
    """

    def __init__(self, spares: int = 3) -> None:
        self.spares = spares
        self._lock = RLock()  # a vector may be freed during any of this, in any thread
        self._kept: list[Memory] = []
        self._used = self._most = 0

    @property
    def kept(self) -> int:
        """Number of values that the kept memory can hold."""
        return sum(len(memory.array) for memory in self._kept)

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            while self._kept:
                _freer.free(self._kept.pop())

    def take(self, length: int) -> Memory | None:
        """Kept memory that is large enough for a vector, but not much larger; None if there is none."""
        with self._lock:
            fitting = [(len(memory.array), at) for at, memory in enumerate(self._kept) if _fits(memory, length)]
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
                _freer.free(self._kept.pop(0))
            self._most = max(self._most, self._used)

    def give(self, memory: Memory, unseen: bool) -> None:
        """Take back the memory of a freed vector, and keep it if it is unseen and few of that length are kept."""
        with self._lock:
            self._used -= len(memory.array)
            if unseen and sum(_fits(other, len(memory.array)) for other in self._kept) < self.spares:
                self._kept.append(memory)
            else:
                _freer.free(memory)


def _fits(memory: Memory, length: int) -> bool:
    return length <= len(memory.array) <= 1.25 * length


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
            descriptor = os.memfd_create("pier", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                descriptor = os.dup(file.fileno())
        self._memory = Memory(descriptor, length)
        self.array = self._memory.array[:length]
        if not self._filed:
            pool.add(length)

    @classmethod
    def scratch(cls, length: int) -> Self:
        """A vector with arbitrary contents, for callers that overwrite all of it: see Pool."""
        if (spare := pool.take(length)) is None:
            return cls(length)
        vector = cls.__new__(cls)
        vector._filed, vector._memory = False, spare
        vector.array = spare.array[:length]
        return vector

    @property
    def path(self) -> str:
        """The path at which other processes find it."""
        return self._memory.path

    def __del__(self) -> None:
        if not hasattr(self, "array") or sys is None or sys.is_finalizing():  # at exit, modules are cleared
            return
        # An attribute and the argument refer to each, and the array to the memory: no other view of it is left.
        unseen = sys.getrefcount(self._memory.array) == 3 and sys.getrefcount(self.array) == 2
        del self.array
        if self._filed:
            _freer.free(self._memory)
        else:
            pool.give(self._memory, unseen)


def attach(path: str, length: int) -> Vector:
    """Map a SharedVector of another process: shape [length]. Its memory is freed with the returned array."""
    return _values(_map(path, length), length)


def _map(path: str, length: int) -> mmap.mmap:
    with open(path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), max(4 * length, 1))


def _values(memory: mmap.mmap, length: int) -> Vector:
    return np.frombuffer(memory, dtype=np.float32, count=length)
