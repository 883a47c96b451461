"""The int4 codec in NumPy: what the compiled loops compute, to the last bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pier_node.base.shared import Vector
from pier_node.outer.codec.blockwise import in_blocks
from pier_node.outer.codec.interface import LARGEST, SMALLEST


def encode(values: Vector, block: int) -> bytes:
    """The code of finite values."""
    blocks = in_blocks(values, block)
    lowest = np.minimum(blocks.min(axis=1, keepdims=True), 0)
    highest = np.maximum(blocks.max(axis=1, keepdims=True), 0)
    levels = np.float32(15)
    steps = (((highest / levels - lowest / levels).view(np.uint32) + np.uint32(0x7FFFF)) >> 19 << 19).view(np.float32)
    steps[steps < SMALLEST] = 0
    below = np.divide(-lowest, steps, out=np.zeros_like(steps), where=steps > 0)
    zeros = np.rint(below)
    quotients = blocks / np.where(steps == 0, np.float32(1), steps) + zeros
    codes = np.clip(np.rint(quotients), 0, 15).astype(np.uint8).ravel()[: len(values)]
    heads = steps.view(np.uint32) >> 15 | zeros.astype(np.uint32)
    packed = codes[: (len(codes) + 1) // 2].copy()
    packed[: len(codes) // 2] |= codes[len(packed) :] << 4
    return bytes(heads.astype("<u2")) + bytes(packed)


def decode(data: bytes, length: int, block: int) -> Vector:
    """The values of a valid code."""
    count = -(-length // block)
    heads = np.frombuffer(data, "<u2", count)[:, None].astype(np.uint32)
    packed = np.frombuffer(data, np.uint8, offset=2 * count)
    codes: npt.NDArray[np.uint8] = np.concatenate([packed & 15, packed >> 4])[:length]
    blocks = in_blocks(codes.view(np.int8), block) - (heads & 15).astype(np.int8)
    with np.errstate(over="ignore"):
        values = np.multiply(blocks, (heads >> 4 << 19).view(np.float32)).ravel()[:length]
    return np.clip(values, -LARGEST, LARGEST)
