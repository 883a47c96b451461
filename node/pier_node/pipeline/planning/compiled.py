"""Compilation with numba, cached on disk so that only the first run waits, and random numbers for compiled code.

numba detects changes only in a function's own file, and much code is inlined here. So each version of the sources has
its own cache folder. If the folder is not writable, every process compiles again. The random numbers are splitmix64:
the same on every machine and with every library version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

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
    """Compile a function; other threads run while it executes."""
    made: Callable[P, R] = numba.njit(cache=_KEPT, nogil=True, error_model="numpy")(function)
    return made


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into its callers: a call with arrays counts references, which costs more than short work."""
    made: Callable[P, R] = numba.njit(cache=_KEPT, nogil=True, error_model="numpy", inline="always")(function)
    return made


Dice = NDArray[np.uint64]


def dice(seed: int) -> Dice:
    """A random stream for each seed."""
    return np.array([seed % 2**64], np.uint64)


@compiled
def uniform(dice: Dice) -> float:
    """A random number from 0 up to, but not including, 1."""
    dice[0] += np.uint64(0x9E3779B97F4A7C15)
    z = dice[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def below(dice: Dice, count: int) -> int:
    """A random integer from 0 to count - 1."""
    return int(uniform(dice) * count)
