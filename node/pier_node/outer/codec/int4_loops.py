"""How the int4 codec computes, in compiled loops; blockwise.py describes its code, and puts it together.

Every operation rounds once, as NumPy's do: nothing is fused. The extremes of a block are found among integers in the
order of the values, because compilers do not use vector instructions for the minimum of floating-point values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from numba import types

from pier_node.base.compiling import Compiler
from pier_node.base.shared import Vector
from pier_node.outer.codec import interface
from pier_node.outer.codec.interface import BadCode

P = ParamSpec("P")
R = TypeVar("R")
Codes = npt.NDArray[np.uint8]

LEVELS = np.float32(15)
LEVELS_BY_CHANCE = np.float32(14)
"""With a spare level, zero can be rounded up, so that no stochastically rounded value is cut off."""
DROPPED = 19
"""Mantissa bits of an fp32 that a step does not have."""
LARGEST, SMALLEST = np.float32(interface.LARGEST), np.float32(interface.SMALLEST)
ZERO, ONE, TOP = np.float32(0), np.float32(1), np.float32(15)
MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(31)
ROUND_UP = np.uint32((1 << DROPPED) - 1)
STEP = np.uint32(0xFFFFFFFF ^ ROUND_UP)
HALF = np.uint8(4)
LOW_HALF = np.uint8(15)

_compiler = Compiler("int4", [Path(__file__)])


def _compiled(result: Any, *arguments: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    return lambda function: _compiler.compiled(function, result(*arguments))


def _read(number: Any, dimensions: int = 1) -> Any:
    return types.Array(number, dimensions, "C", readonly=True)


def _written(number: Any, dimensions: int = 1) -> Any:
    return types.Array(number, dimensions, "C")


@_compiled(
    types.void,
    _read(types.float32, 2),
    types.float32,
    _read(types.float32, 2),
    _written(types.uint16),
    _written(types.uint8, 2),
)
def quantize(blocks: Vector, levels: np.float32, noise: Vector, heads: npt.NDArray[np.uint16], codes: Codes) -> None:
    """Write the parameters of each block, and a code for each value.

    Args:
        blocks: finite values, shape [blocks, block], as `codes`.
        levels: number of steps in the range of a block.
        noise: in 0..1, shape [blocks, block], rounds stochastically; without rows, all is rounded to nearest.
    """
    orders = blocks.view(np.int32)
    ends, step = np.empty(2, np.float32), np.empty(1, np.float32)
    end_bits, step_bits = ends.view(np.int32), step.view(np.uint32)
    for block in range(len(blocks)):
        row, lowest, highest = orders[block], np.int32(0), np.int32(0)
        for at in range(len(row)):
            order = np.int32(row[at] ^ np.int32(np.int32(row[at] >> SIGN) & MAGNITUDE))
            lowest, highest = np.int32(min(lowest, order)), np.int32(max(highest, order))
        end_bits[0], end_bits[1] = np.int32(lowest ^ np.int32(np.int32(lowest >> SIGN) & MAGNITUDE)), highest
        step[0] = ends[1] / levels - ends[0] / levels  # the range itself may be infinite
        step_bits[0] = np.uint32(step_bits[0] + ROUND_UP) & STEP
        divisor, zero = step[0], ZERO
        if divisor < SMALLEST:  # such a block becomes zero
            divisor, step[0] = ONE, ZERO
        else:
            zero = np.ceil(-ends[0] / divisor) if len(noise) else np.rint(-ends[0] / divisor)
        heads[block] = step_bits[0] >> np.uint32(DROPPED - 4) | np.uint32(zero)
        values, out = blocks[block], codes[block]
        if len(noise):
            chances = noise[block]
            for at in range(len(values)):
                level = np.floor(np.float32(values[at] / divisor + zero) + chances[at])
                out[at] = np.int32(min(max(level, ZERO), TOP))
        else:
            for at in range(len(values)):
                level = np.rint(np.float32(values[at] / divisor + zero))
                level = level if level > ZERO else ZERO
                level = level if level < TOP else TOP
                out[at] = np.uint8(np.int32(level))


@_compiled(types.void, _read(types.uint8), _written(types.uint8))
def pack(codes: Codes, packed: Codes) -> None:
    """Pack two codes per byte; the two halves of the vector share bytes, not neighbors, to avoid strided access."""
    middle = len(packed)
    lower, upper = codes[:middle], codes[middle:]
    for at in range(len(upper)):
        packed[at] = lower[at] | np.uint8(upper[at] << HALF)
    packed[len(upper) :] = lower[len(upper) :]


@_compiled(types.void, _read(types.uint8), _written(types.uint8))
def unpack(packed: Codes, codes: Codes) -> None:
    """The inverse of `pack`."""
    middle = len(packed)
    lower, upper = codes[:middle], codes[middle:]
    for at in range(middle):
        lower[at] = packed[at] & LOW_HALF
    for at in range(len(upper)):
        upper[at] = packed[at] >> HALF


_LARGEST_STEP = (np.array([LARGEST / LEVELS_BY_CHANCE * 2], np.float32).view(np.uint32) + ROUND_UP & STEP).view(
    np.float32
)


def read_parameters(heads: npt.NDArray[np.uint16]) -> tuple[Vector, npt.NDArray[np.int8]]:
    """Step and zero of each block. Raises BadCode."""
    bits = heads.astype(np.uint32) >> 4
    steps = (bits << DROPPED).view(np.float32)
    if not ((heads == 0) | (steps >= SMALLEST) & (steps <= _LARGEST_STEP)).all():
        raise BadCode("int4: a step is out of range")
    return steps, (heads & 15).astype(np.int8)


@_compiled(types.boolean, _read(types.uint8, 2), _read(types.float32), _read(types.int8), _written(types.float32, 2))
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
