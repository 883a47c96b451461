"""Blockwise integer codecs: int8 and int4, with parameters for each block of values.

Int8: value ≈ code · scale, with codes in -127..127 and scale = absmax of the block / 127 (Dettmers et al., arXiv
2110.02861, with uniform levels). Layout: the bf16 scale of each block of 128, then one signed byte per value. Blocks of
half the size would lower the error of Gaussian values by 8 %, but that is what the 0.125 bits of their scales are worth
anyway.

Int4: value ≈ (code - zero) · step, with code and zero in 0..15: 16 even levels over the range of a block, one of them
exactly 0. This is the asymmetric quantizer of Jacob et al., arXiv 1712.05877, with both parameters in 16 bits: the step
is an fp32 without sign and with 4 bits of mantissa, rounded up, and the zero takes the lowest 4 bits. On
pseudo-gradients its error is 15 % below that of levels from -absmax to absmax, and about that of NF4 (docs/results.md).
Layout: the parameters of each block of 64, then one byte for values j and ceil(n / 2) + j, the first in the low half.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pier_node.base.shared import Buffer, Vector
from pier_node.outer.codec import interface
from pier_node.outer.codec.interface import BadCode, Codec, check_size, check_values, from_bf16, to_bf16

Number = TypeVar("Number", bound=np.generic)


def in_blocks(values: npt.NDArray[Number], block: int) -> npt.NDArray[Number]:
    """Reshape [n] to [blocks, block]: a view, or a copy padded with zeros if the last block is not full."""
    missing = -len(values) % block
    if missing:
        values = np.concatenate([values, np.zeros(missing, values.dtype)])
    return values.reshape(-1, block)


def block_count(length: int, block: int) -> int:
    """Number of blocks that so many values take."""
    return -(-length // block)


def block_maximum(values: Vector) -> Vector:
    """The largest value of each row, shape [blocks, 1]; for short rows `reduceat` is twice as fast as `max(axis=1)`."""
    return np.maximum.reduceat(values.ravel(), np.arange(0, values.size, values.shape[1]))[:, None]


INT8_BLOCK = 128
INT8_LEVELS = 127

_LARGEST_SCALE = int(to_bf16(np.array([interface.LARGEST / INT8_LEVELS], np.float32))[0])
_SMALLEST_SCALE = int(to_bf16(np.array([interface.SMALLEST], np.float32))[0])


class Int8(Codec):
    """Int8 codec: 8.125 bits per value; error at most half a scale, and below 2^-119 in blocks smaller than that.

    Args:
        block: number of values that share a scale.
    """

    name = "int8"

    def __init__(self, block: int = INT8_BLOCK) -> None:
        self._block = block

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        check_values(values)
        blocks = in_blocks(values, self._block)
        scales = block_maximum(np.abs(blocks)) / np.float32(INT8_LEVELS)
        scales[scales < interface.SMALLEST] = 0
        halves = to_bf16(scales)
        divisors = from_bf16(halves)
        divisors[divisors == 0] = 1  # values below the smallest scale become zero
        quotients = blocks / divisors
        np.rint(quotients, out=quotients)
        codes = quotients.astype(np.int8).ravel()[: len(values)]
        return halves.astype("<u2", copy=False).tobytes() + codes.tobytes()

    def decode(self, data: Buffer, length: int) -> Vector:
        """See Codec."""
        check_size(self, data, length)
        count = block_count(length, self._block)
        halves = np.frombuffer(data, "<u2", count)[:, None]
        codes = np.frombuffer(data, np.int8, offset=2 * count)
        if ((halves > _LARGEST_SCALE) | (halves != 0) & (halves < _SMALLEST_SCALE)).any():
            raise BadCode("int8: a scale is out of range")
        blocks = in_blocks(codes, self._block)
        if codes.min() < -INT8_LEVELS or blocks[halves[:, 0] == 0].any():
            raise BadCode("int8: a code is out of range")
        return np.multiply(blocks, from_bf16(halves)).ravel()[:length]

    def size(self, length: int) -> int:
        """See Codec."""
        return 2 * block_count(length, self._block) + length


INT4_BLOCK = 64


class Int4(Codec):
    """Int4 codec: 4.25 bits per value; error at most half a step, below 2^-122 in blocks whose range is smaller.

    Args:
        block: number of values that share a step and a zero.
    """

    name = "int4"

    def __init__(self, block: int = INT4_BLOCK) -> None:
        self._block = block

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        from pier_node.outer.codec import int4_loops  # with numba: see get_ready

        check_values(values)
        blocks = in_blocks(values, self._block)
        heads, codes = np.empty(len(blocks), np.uint16), np.empty(blocks.shape, np.uint8)
        int4_loops.quantize(blocks, heads, codes)
        packed = np.empty((len(values) + 1) // 2, np.uint8)
        int4_loops.pack(codes.ravel()[: len(values)], packed)
        return heads.astype("<u2", copy=False).tobytes() + packed.tobytes()

    def decode(self, data: Buffer, length: int) -> Vector:
        """See Codec."""
        from pier_node.outer.codec import int4_loops  # with numba

        check_size(self, data, length)
        count = block_count(length, self._block)
        steps, zeros = int4_loops.read_parameters(np.frombuffer(data, "<u2", count))
        packed = np.frombuffer(data, np.uint8, offset=2 * count)
        if length % 2 and packed[-1] > 15:
            raise BadCode("int4: there is a value too many")
        codes, values = np.zeros((count, self._block), np.uint8), np.empty((count, self._block), np.float32)
        int4_loops.unpack(packed, codes.ravel()[:length])
        if not int4_loops.dequantize(codes, steps, zeros, values):
            raise BadCode("int4: a block without a step is not zero")
        return values.ravel()[:length]

    def size(self, length: int) -> int:
        """See Codec."""
        return 2 * block_count(length, self._block) + (length + 1) // 2
