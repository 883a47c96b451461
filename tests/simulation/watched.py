"""Vectors that tell when all of them is worked on in the event loop: beats and deadlines stand still meanwhile.

A model is gigabytes: what takes microseconds in a test takes seconds there. Pieces, of a chunk each, are allowed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from simulation.virtual_time import in_a_thread

from pier_node.base import shared
from pier_node.outer import state


class Watched(np.ndarray[Any, Any]):
    """An array that notes what is done with more than `piece` of its elements outside of threads."""

    piece = 1 << 60
    noted: set[str]

    @classmethod
    def note(cls, size: int) -> None:
        if size <= cls.piece or in_a_thread():
            return
        ours = [frame for frame in traceback.extract_stack() if "/pier_node/" in frame.filename]
        cls.noted.add(" < ".join(f"{it.filename.rpartition('/')[2]}:{it.lineno} {it.line}" for it in ours[-1:-5:-1]))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        self.note(max(getattr(it, "size", 1) for it in (*inputs, *out)))
        if out:
            options["out"] = tuple(map(_plain, out))
        result = getattr(ufunc, method)(*map(_plain, inputs), **options)
        return out[0] if out else result.view(Watched) if isinstance(result, np.ndarray) else result

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        self.note(max((it.size for it in args if isinstance(it, np.ndarray)), default=0))
        return func(*map(_plain, args), **options)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.note(np.ndarray.__getitem__(self, key).size if isinstance(key, slice) else 0)
        np.ndarray.__setitem__(self, key, value)

    def fill(self, value: Any) -> None:
        self.note(self.size)
        np.ndarray.fill(self, value)

    def copy(self, *args: Any) -> Any:
        self.note(self.size)
        return np.ndarray.copy(self, *args)

    def tobytes(self, *args: Any) -> bytes:
        self.note(self.size)
        return np.ndarray.tobytes(self, *args)


def _plain(array: Any) -> Any:
    if isinstance(array, list | tuple):
        return [_plain(it) for it in array]
    return array.view(np.ndarray) if isinstance(array, Watched) else array


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, piece: int) -> Iterator[set[str]]:
    """Make every SharedVector a watched one; gives the places where more than a piece was worked on."""
    in_pieces = state.in_pieces

    class Memory(shared.Memory):
        def __init__(self, file: int, length: int) -> None:
            super().__init__(file, length)
            self.array = self.array.view(Watched)

    monkeypatch.setattr(shared, "Memory", Memory)

    def noted(work: Any, length: int) -> list[Any]:
        Watched.note(length)
        return in_pieces(work, length)

    monkeypatch.setattr(state, "in_pieces", noted)
    monkeypatch.setattr(state, "PIECE", piece)
    monkeypatch.setattr(shared, "pool", shared.Pool(spares=0))
    Watched.noted, Watched.piece = set(), piece
    yield Watched.noted
