"""Blockwise int8: value ≈ code · scale, with code in -127..127 and scale = absmax of the block / 127 (Dettmers et al.,
arXiv 2110.02861, with uniform levels).

Layout: bf16 scale of each block of 128, then a signed byte a value. Blocks of half the size would lower the error of
Gaussian values by 8 %, which is what their scales' 0.125 bits are worth anyway.
"""

from __future__ import annotations

import numpy as np

from pier_node.outer.codec.bf16 import from_bf16, to_bf16
from pier_node.outer.codec.blocks import block_maximum, in_blocks, to_integers
from pier_node.outer.codec.interface import LARGEST, SMALLEST, BadCode, check_size, check_values
from pier_node.shared import Vector

BLOCK = 128
LEVELS = 127
LEVELS_BY_CHANCE = 126
"""The scale is rounded too, by up to 0.2 %: rounding up by chance needs a level to spare."""

_LARGEST_SCALE = int(to_bf16(np.array([LARGEST / LEVELS], np.float32))[0])
_SMALLEST_SCALE = int(to_bf16(np.array([SMALLEST], np.float32))[0])


class Int8:
    """8.125 bits a value; error at most half a scale, and below 2^-119 in blocks that are smaller than that.

    Args:
        rng: round by chance, without bias; to nearest if there is none.
    """

    name = "int8"
    lossy = True

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self._rng = rng

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        check_values(values)
        blocks = in_blocks(values, BLOCK)
        scales = block_maximum(np.abs(blocks)) / np.float32(LEVELS_BY_CHANCE if self._rng else LEVELS)
        scales[scales < SMALLEST] = 0
        halves = to_bf16(scales)
        divisors = from_bf16(halves)
        divisors[divisors == 0] = 1  # what is smaller than the smallest scale becomes zero
        quotients = blocks / divisors
        to_integers(quotients, self._rng)
        codes = quotients.astype(np.int8).ravel()[: len(values)]
        return halves.astype("<u2", copy=False).tobytes() + codes.tobytes()

    def decode(self, data: bytes, length: int) -> Vector:
        """See Codec."""
        check_size(self, data, length)
        count = _blocks(length)
        halves = np.frombuffer(data, "<u2", count)[:, None]
        codes = np.frombuffer(data, np.int8, offset=2 * count)
        if ((halves > _LARGEST_SCALE) | (halves != 0) & (halves < _SMALLEST_SCALE)).any():
            raise BadCode("int8: a scale is out of range")
        blocks = in_blocks(codes, BLOCK)
        if codes.min() < -LEVELS or blocks[halves[:, 0] == 0].any():
            raise BadCode("int8: a code is out of range")
        return np.multiply(blocks, from_bf16(halves)).ravel()[:length]

    def size(self, length: int) -> int:
        """See Codec."""
        return 2 * _blocks(length) + length


def _blocks(length: int) -> int:
    return -(-length // BLOCK)
