"""Compilation by numba, kept on disk so that only the first run waits for it.

numba notices a change of a function's own file only, and much is inlined here: so a folder belongs to one state of the
sources. Where nothing can be written, every process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def _keep() -> bool:
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = home / "pier" / f"paths-{hashlib.sha256(sources).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    vars(numba.config)["CACHE_DIR"] = str(folder)
    return os.access(folder, os.W_OK)


_KEPT = _keep()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function; it lets other threads run meanwhile."""
    made: Callable[P, R] = numba.njit(cache=_KEPT, nogil=True, error_model="numpy")(function)
    return made


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function into its callers: calls with arrays count references, which costs more than short work."""
    made: Callable[P, R] = numba.njit(cache=_KEPT, nogil=True, error_model="numpy", inline="always")(function)
    return made
