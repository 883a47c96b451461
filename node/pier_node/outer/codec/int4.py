"""Blockwise int4: value ≈ (code - zero) · step, with code and zero in 0..15: 16 even levels over the range of a block,
one of them exactly 0.

The asymmetric quantiser of Jacob et al., arXiv 1712.05877, with its two parameters in 16 bits: a step is fp32 without
sign and with 4 bits of mantissa, rounded up, and the zero takes the lowest 4. On pseudo-gradients its error is 15 %
below that of levels from -absmax to absmax, and about that of NF4 (docs/results.md), which is hard to round by chance.

Layout: parameters of each block of 64, then a byte for values j and ceil(n / 2) + j, the first in the low half.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pier_node.outer.codec.blocks import block_maximum, block_minimum, in_blocks, to_integers
from pier_node.outer.codec.interface import LARGEST, SMALLEST, BadCode, check_size, check_values
from pier_node.shared import Vector

BLOCK = 64
LEVELS = 15
LEVELS_BY_CHANCE = 14
"""With one to spare, zero can be rounded up, so that no value that chance rounds up or down is cut off."""
DROPPED = 19
"""Bits of an fp32's mantissa that a step has not."""


class Int4:
    """4.25 bits a value; error at most half a step, and below 2^-122 in blocks whose range is smaller than that.

    Args:
        rng: round by chance, without bias; to nearest if there is none.
    """

    name = "int4"
    lossy = True

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self._rng = rng

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        check_values(values)
        blocks = in_blocks(values, BLOCK)
        steps, zeros = self._parameters(blocks)
        divisors = steps.copy()
        divisors[steps == 0] = 1
        quotients = blocks / divisors
        quotients += zeros
        to_integers(quotients, self._rng)
        np.clip(quotients, 0, 15, out=quotients)
        codes = quotients.astype(np.uint8).ravel()[: len(values)]
        head = steps.view(np.uint32) >> (DROPPED - 4) | zeros.astype(np.uint32)
        return head.astype("<u2").tobytes() + _pack(codes).tobytes()

    def _parameters(self, blocks: Vector) -> tuple[Vector, Vector]:
        """Step and zero of each block, shapes [blocks, 1]."""
        lowest: Vector = np.minimum(block_minimum(blocks), 0)
        highest: Vector = np.maximum(block_maximum(blocks), 0)
        levels = np.float32(LEVELS_BY_CHANCE if self._rng else LEVELS)
        steps = _round_up(highest / levels - lowest / levels)  # their difference may be infinite
        steps[steps < SMALLEST] = 0  # such a block becomes zero
        below = np.divide(-lowest, steps, out=np.zeros_like(steps), where=steps > 0)
        return steps, np.ceil(below) if self._rng else np.rint(below)

    def decode(self, data: bytes, length: int) -> Vector:
        """See Codec."""
        check_size(self, data, length)
        count = _blocks(length)
        steps, zeros = _read_parameters(np.frombuffer(data, "<u2", count)[:, None])
        codes = _unpack(np.frombuffer(data, np.uint8, offset=2 * count), length)
        blocks = in_blocks(codes.view(np.int8), BLOCK)
        if blocks[steps[:, 0] == 0].any():
            raise BadCode("int4: a block without a step is not zero")
        blocks = blocks - zeros
        with np.errstate(over="ignore"):
            values = np.multiply(blocks, steps).ravel()[:length]
        if steps.max() > LARGEST / LEVELS:
            np.clip(values, -LARGEST, LARGEST, out=values)
        return values

    def size(self, length: int) -> int:
        """See Codec."""
        return 2 * _blocks(length) + (length + 1) // 2


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _round_up(steps: Vector) -> Vector:
    bits = steps.view(np.uint32) + np.uint32((1 << DROPPED) - 1)
    bits >>= DROPPED
    bits <<= DROPPED
    return bits.view(np.float32)


_LARGEST_STEP = _round_up(np.array([LARGEST / LEVELS_BY_CHANCE * 2], np.float32))[0]


def _read_parameters(head: npt.NDArray[np.uint16]) -> tuple[Vector, npt.NDArray[np.int8]]:
    """Step and zero of each block, of the shape of `head`. Raises BadCode."""
    bits = head.astype(np.uint32) >> 4
    steps = (bits << DROPPED).view(np.float32)
    if not ((head == 0) | (steps >= SMALLEST) & (steps <= _LARGEST_STEP)).all():
        raise BadCode("int4: a step is out of range")
    return steps, (head & 15).astype(np.int8)


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two to a byte; the halves of the vector, not neighbours, share one: that takes no strided access."""
    middle = (len(codes) + 1) // 2
    packed = codes[:middle].copy()
    packed[: len(codes) - middle] |= codes[middle:] << 4
    return packed


def _unpack(packed: npt.NDArray[np.uint8], length: int) -> npt.NDArray[np.uint8]:
    if length % 2 and packed[-1] > 15:
        raise BadCode("int4: there is a value too many")
    codes = np.empty(length, np.uint8)
    middle = len(packed)
    np.bitwise_and(packed, 15, out=codes[:middle])
    np.right_shift(packed[: length - middle], 4, out=codes[middle:])
    return codes
