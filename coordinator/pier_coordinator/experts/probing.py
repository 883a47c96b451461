"""Short probes of all domains, from which difficulty is estimated: byte n-grams stand in for the models S, M and L.

A longer context stands for more size, more text for more steps. The n-grams use Witten and Bell's interpolation (IEEE
Trans. Information Theory 37, 1991),

    p_o(x | c) = (n(c, x) + r(c) · p_{o-1}(x | c')) / (n(c) + r(c)),

where r(c) counts the different bytes that followed c, and c' is c without its first byte. Such measures are weak
proxies for how domains differ; they do not tell what a transformer would gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.difficulty import Probes
from pier_coordinator.experts.problem import Array

Codes = npt.NDArray[np.int64]


def bits(train: bytes, text: bytes, orders: Sequence[int]) -> Array:
    """Score the bytes of `text` with a model of each order, trained on `train`.

    Args:
        train: the text to train on.
        text: the text to score.
        orders: bytes of context, from 0 to 6, in ascending order.

    Returns:
        -log2 p in bits, [orders, bytes].
    """
    chance, found = np.full(len(text), 1 / 256), []
    for order in range(orders[-1] + 1):
        chance = _interpolated(train, text, order, chance)
        if order in orders:
            found.append(-np.log2(chance))
    return np.stack(found)


def _interpolated(train: bytes, text: bytes, order: int, shorter: Array) -> Array:
    """p_o of each byte of a text, from p_{o-1} (`shorter`); both are [bytes]."""
    grams, counts = np.unique(_codes(train, order + 1), return_counts=True)
    contexts, first = np.unique(grams >> 8, return_index=True)
    total = np.add.reduceat(counts, first)
    followers = np.diff(np.append(first, len(grams)))
    asked = _codes(text, order + 1)
    seen, known = _looked_up(grams, counts, asked), _looked_up(contexts, total, asked >> 8)
    weight = _looked_up(contexts, followers, asked >> 8)
    return np.asarray(np.where(known > 0, (seen + weight * shorter) / np.maximum(known + weight, 1), shorter))


def _codes(text: bytes, length: int) -> Codes:
    """Each byte and those before it, `length` in total, as a number; zeros precede the text."""
    padded = np.frombuffer(bytes(length - 1) + text, dtype=np.uint8).astype(np.int64)
    codes = np.zeros(len(text), dtype=np.int64)
    for back in range(length):
        codes = (codes << 8) | padded[back : back + len(text)]
    return codes


def _looked_up(keys: Codes, values: npt.NDArray[np.intp], asked: Codes) -> npt.NDArray[np.intp]:
    """The values of the requested keys; 0 for a missing key."""
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0)


ORDERS = (2, 3, 4)
"""Bytes of context for S, M and L."""
PARTS = (0.25, 0.5, 1.0)
"""Fractions of the sample that are trained on."""
ROW = 512
"""Number of bytes in a scored row."""


@dataclass(frozen=True)
class Sample:
    """Text of a domain: `train` to train on, `held_out` to score."""

    train: bytes
    held_out: bytes


def probed(samples: Sequence[Sample], parameters: Array) -> Probes:
    """Probe all domains, each with as much text as the smallest sample has.

    Args:
        samples: one per domain.
        parameters: number of parameters of S, M and L, [3].

    Raises:
        ValueError: a sample has fewer than two rows to score; its index is the argument.
    """
    rows = min(len(sample.held_out) for sample in samples) // ROW
    if rows < 2:
        raise ValueError(min(range(len(samples)), key=lambda index: len(samples[index].held_out)))
    length = min(len(sample.train) for sample in samples)
    counts = [int(part * length) for part in PARTS]
    losses = [
        np.concatenate([_rows(sample.train[:count], sample.held_out[: rows * ROW]) for count in counts])
        for sample in samples
    ]
    points = len(PARTS)
    return Probes(np.tile(parameters, points), np.repeat(np.array(counts, float), len(ORDERS)), np.stack(losses))


def _rows(train: bytes, text: bytes) -> Array:
    """Bits per byte of each row, [orders, rows]."""
    return np.asarray(bits(train, text, ORDERS).reshape(len(ORDERS), -1, ROW).mean(axis=-1))
