"""How the int4 codec computes, in compiled loops; blockwise.py describes its code, and puts it together.

Every operation rounds once, as NumPy's do: nothing is fused. The extremes of a block are found among integers in the
order of the values, because compilers do not use vector instructions for the minimum of floating-point values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from numba import types

from pier_node.base.compiling import Compiler, read, written
from pier_node.base.shared import Vector
from pier_node.outer.codec import interface
from pier_node.outer.codec.interface import BadCode

Codes = npt.NDArray[np.uint8]

LEVELS = np.float32(15)
"""Steps in the range of a block."""
DROPPED = 19
"""Mantissa bits of an fp32 that a step does not have."""
LARGEST, SMALLEST = np.float32(interface.LARGEST), np.float32(interface.SMALLEST)
ZERO, ONE = np.float32(0), np.float32(1)
MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(31)
ROUND_UP = np.uint32((1 << DROPPED) - 1)
STEP = np.uint32(0xFFFFFFFF ^ ROUND_UP)
HALF = np.uint8(4)
LOW_HALF = np.uint8(15)

compiled = Compiler("int4", [Path(__file__)]).typed


@compiled(types.void, read(types.float32, 2), written(types.uint16), written(types.uint8, 2))
def quantize(blocks: Vector, heads: npt.NDArray[np.uint16], codes: Codes) -> None:
    """Write the parameters of each block of finite values, and their codes: both have shape [blocks, block]."""
    orders = blocks.view(np.int32)
    ends, step = np.empty(2, np.float32), np.empty(1, np.float32)
    end_bits, step_bits = ends.view(np.int32), step.view(np.uint32)
    for block in range(len(blocks)):
        row, lowest, highest = orders[block], np.int32(0), np.int32(0)
        for at in range(len(row)):
            order = np.int32(row[at] ^ np.int32(np.int32(row[at] >> SIGN) & MAGNITUDE))
            lowest, highest = np.int32(min(lowest, order)), np.int32(max(highest, order))
        end_bits[0], end_bits[1] = np.int32(lowest ^ np.int32(np.int32(lowest >> SIGN) & MAGNITUDE)), highest
        step[0] = ends[1] / LEVELS - ends[0] / LEVELS  # the range itself may be infinite
        step_bits[0] = np.uint32(step_bits[0] + ROUND_UP) & STEP
        divisor, zero = step[0], ZERO
        if divisor < SMALLEST:  # such a block becomes zero
            divisor, step[0] = ONE, ZERO
        else:
            zero = np.rint(-ends[0] / divisor)
        heads[block] = step_bits[0] >> np.uint32(DROPPED - 4) | np.uint32(zero)
        values, out = blocks[block], codes[block]
        for at in range(len(values)):
            level = np.rint(np.float32(values[at] / divisor + zero))
            level = level if level > ZERO else ZERO
            level = level if level < LEVELS else LEVELS
            out[at] = np.uint8(np.int32(level))


@compiled(types.void, read(types.uint8), written(types.uint8))
def pack(codes: Codes, packed: Codes) -> None:
    """Pack two codes per byte; the two halves of the vector share bytes, not neighbors, to avoid strided access."""
    middle = len(packed)
    lower, upper = codes[:middle], codes[middle:]
    for at in range(len(upper)):
        packed[at] = lower[at] | np.uint8(upper[at] << HALF)
    packed[len(upper) :] = lower[len(upper) :]


@compiled(types.void, read(types.uint8), written(types.uint8))
def unpack(packed: Codes, codes: Codes) -> None:
    """The inverse of `pack`."""
    middle = len(packed)
    lower, upper = codes[:middle], codes[middle:]
    for at in range(middle):
        lower[at] = packed[at] & LOW_HALF
    for at in range(len(upper)):
        upper[at] = packed[at] >> HALF


_LARGEST_STEP = (np.array([LARGEST / LEVELS * 2], np.float32).view(np.uint32) + ROUND_UP & STEP).view(np.float32)


def read_parameters(heads: npt.NDArray[np.uint16]) -> tuple[Vector, npt.NDArray[np.int8]]:
    """Step and zero of each block. Raises BadCode."""
    bits = heads.astype(np.uint32) >> 4
    steps = (bits << DROPPED).view(np.float32)
    if not ((heads == 0) | (steps >= SMALLEST) & (steps <= _LARGEST_STEP)).all():
        raise BadCode("int4: a step is out of range")
    return steps, (heads & 15).astype(np.int8)


@compiled(types.boolean, read(types.uint8, 2), read(types.float32), read(types.int8), written(types.float32, 2))
def dequantize(codes: Codes, steps: Vector, zeros: npt.NDArray[np.int8], blocks: Vector) -> bool:
    """Write the values, shape [blocks, block] as the codes. False: a block without a step is not zero."""
    right = True
    for block in range(len(codes)):
        row, out, step, zero = codes[block], blocks[block], steps[block], np.int32(zeros[block])
        if step == ZERO:
            for at in range(len(row)):
                right = right and row[at] == 0
        for at in range(len(row)):
            value = np.float32(np.int32(np.int32(row[at]) - zero)) * step
            value = value if value > -LARGEST else -LARGEST
            out[at] = value if value < LARGEST else LARGEST
    return right
