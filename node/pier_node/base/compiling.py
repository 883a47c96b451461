"""Compiles inner loops with numba, once for each version of their sources.

numba detects changes only in a function's own file, although code of other files may be inlined there. So each version
of the sources has its own cache folder, and only the first run waits. If the folder is not writable, every process
compiles again.

To import numba and such functions takes a second and 130 MB: a module that has them is imported only where they are
called.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba import types

P = ParamSpec("P")
R = TypeVar("R")


class Compiler:
    """Compiles the functions of some source files."""

    def __init__(self, name: str, sources: Iterable[Path]) -> None:
        code = b"".join(file.read_bytes() for file in sorted(sources))
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._folder = home / "pier" / f"{name}-{hashlib.sha256(code).hexdigest()[:16]}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._kept = os.access(self._folder, os.W_OK)
        except OSError:
            self._kept = False

    def compiled(self, function: Callable[P, R], signature: Any = None, **options: Any) -> Callable[P, R]:
        """Compile a function, with a signature at once; other threads run while it executes."""
        if self._kept:
            vars(numba.config)["CACHE_DIR"] = str(self._folder)
        made: Callable[P, R] = numba.njit(signature, cache=self._kept, nogil=True, error_model="numpy", **options)(
            function
        )
        return made

    def inlined(self, function: Callable[P, R]) -> Callable[P, R]:
        """Compile a function into its callers: a call with arrays counts references, which takes long."""
        return self.compiled(function, inline="always")

    def typed(self, result: Any, *arguments: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator that compiles at once, for arguments of these types of numba."""
        return lambda function: self.compiled(function, result(*arguments))


def read(number: Any, dimensions: int = 1) -> Any:
    """numba's type of an array that is only read."""
    return types.Array(number, dimensions, "C", readonly=True)


def written(number: Any, dimensions: int = 1) -> Any:
    """numba's type of an array that is written, too."""
    return types.Array(number, dimensions, "C")
