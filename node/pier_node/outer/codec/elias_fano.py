"""Rising indices in 8 bits each: the code of Elias (1974) and Fano (1971) for k of at most 64·k values.

The lower 6 bits of an index are written as they are. The upper ones are below k and never fall from one index to the
next: 2k bits, of which bit `rank + upper` is set for each index. At k = 64 the least that any code takes is
log2 C(4096, 64) / 64 = 7.4 bits, and a plain index 12.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pier_node.outer.codec.interface import BadCode

DENSITY = 64
"""One index to so many values."""
LOWER = 6
BITS = 8
"""Bits of an index in all."""

Bits = npt.NDArray[np.uint8]
"""One bit in each element."""
Indices = npt.NDArray[np.int64]


def index_bits(indices: Indices) -> Bits:
    """The code of indices below 64·k, each row rising: [rows, k] to [rows, 8k]."""
    rows, count = indices.shape
    lower = spread((indices % DENSITY).astype(np.uint8), LOWER)
    unary = np.zeros((rows, (BITS - LOWER) * count), np.uint8)
    np.put_along_axis(unary, indices // DENSITY + np.arange(count), 1, axis=1)
    return np.concatenate([lower, unary], axis=1)


def read_indices(bits: Bits, length: int) -> Indices:
    """The indices of a code, all below `length`: [rows, 8k] to [rows, k]. Raises BadCode."""
    count = bits.shape[1] // BITS
    lower, unary = bits[:, : LOWER * count], bits[:, LOWER * count :]
    if (np.count_nonzero(unary, axis=1) != count).any():
        raise BadCode("there are more or fewer indices than there should be")
    upper = np.nonzero(unary)[1].reshape(-1, count) - np.arange(count)
    indices: Indices = upper * DENSITY + collect(lower, LOWER)
    if (np.diff(indices, axis=1) <= 0).any() or indices.max() >= length:
        raise BadCode("an index is out of order or out of range")
    return indices


def spread(numbers: npt.NDArray[np.uint8], width: int) -> Bits:
    """The lowest `width` bits of numbers, the lowest first: [rows, n] to [rows, n·width]."""
    return np.unpackbits(numbers[..., None], axis=2, count=width, bitorder="little").reshape(len(numbers), -1)


def collect(bits: Bits, width: int) -> npt.NDArray[np.uint8]:
    """The numbers that were spread: [rows, n·width] to [rows, n]."""
    grouped: npt.NDArray[Any] = bits.reshape(len(bits), -1, width)
    return np.packbits(grouped, axis=2, bitorder="little")[..., 0]
