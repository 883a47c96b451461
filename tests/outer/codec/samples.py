"""Vectors of many kinds and sizes, for properties that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from pier_node.base.shared import Vector

LARGEST = float(np.finfo(np.float32).max)

KINDS: dict[str, Callable[[np.random.Generator, int], object]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "heavy-tailed": lambda rng, n: rng.standard_t(2, n),
    "many magnitudes": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-44, 38, n),
    "positive": lambda rng, n: rng.exponential(size=n),
    "constant": lambda rng, n: np.full(n, rng.standard_normal()),
    "zeros": lambda rng, n: np.zeros(n),
    "negative zeros": lambda rng, n: np.full(n, -0.0),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.003),
    "ties": lambda rng, n: rng.integers(-2, 3, n),
    "denormal": lambda rng, n: rng.integers(-9, 10, n) * 1e-45,
    "nearly denormal": lambda rng, n: rng.standard_normal(n) * 1e-37,
    "huge": lambda rng, n: rng.uniform(-1, 1, n) * LARGEST,
    "largest": lambda rng, n: rng.choice([-LARGEST, LARGEST, 0.0], n),
}
SIZES = st.integers(1, 300) | st.integers(4000, 9000) | st.sampled_from([64, 128, 4096, 8192])


def vector(kind: str, length: int, seed: int = 1) -> Vector:
    """A vector of a kind."""
    return np.asarray(KINDS[kind](np.random.default_rng(seed), length), np.float64).astype(np.float32)


VECTORS = st.builds(vector, st.sampled_from(sorted(KINDS)), SIZES, st.integers(0, 99))


def relative_error(values: Vector, decoded: Vector) -> float:
    """|x - y| / |x|, in fp64."""
    exact = values.astype(np.float64)
    return float(np.linalg.norm(exact - decoded) / np.linalg.norm(exact))
