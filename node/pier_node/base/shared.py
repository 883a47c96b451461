"""A vector of fp32 in anonymous shared memory: where the daemon and its workers meet.

Memory of `memfd_create` has no name in the file system: it cannot outlive the processes that map it, and it is not
bounded by the size of /dev/shm, which is 64 MB in a default container.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import defaultdict
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


class SharedVector:
    """`length` fp32 values, zero at first, that other processes of this user can map by `path` as long as it lives."""

    SPARES: ClassVar[int] = 3
    """Vectors of a length that are kept for `scratch`."""
    _spares: ClassVar[dict[int, list[tuple[int, Vector]]]] = defaultdict(list)

    def __init__(self, length: int) -> None:
        self._fd = os.memfd_create("pier", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(4 * length, 1))
        self.array = attach(self.path, length)

    @classmethod
    def scratch(cls, length: int) -> Self:
        """One with anything in it, for those who write all of it.

        It takes the memory of one that nobody uses any more if there is one: a fresh page has to be zeroed by the
        kernel first, which costs several times what an outer step does.
        """
        try:
            spare = cls._spares[length].pop()
        except IndexError:
            return cls(length)
        vector = cls.__new__(cls)
        vector._fd, vector.array = spare
        return vector

    @property
    def path(self) -> str:
        """Where other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def __del__(self) -> None:
        if not hasattr(self, "array") or sys is None or sys.is_finalizing():  # the last modules go without their names
            return
        spares = self._spares[len(self.array)]
        unseen = sys.getrefcount(self.array) == 2  # this attribute and the argument: no view of it is left
        if unseen and len(spares) < self.SPARES:
            spares.append((self._fd, self.array))
        else:
            os.close(self._fd)


def attach(path: str, length: int) -> Vector:
    """Map a SharedVector of another process: shape [length]. Its memory is freed with the returned array."""
    with open(path, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), max(4 * length, 1))
    return np.frombuffer(memory, dtype=np.float32, count=length)
