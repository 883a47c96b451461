"""Codecs without blocks: plain fp32, and bfloat16.

Plain is little-endian fp32, neither copied nor checked: whoever adds the values up checks their norm. Bf16 is the upper
half of an fp32, rounded to nearest even; a value that would become infinite becomes the largest bf16 instead.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pier_node.base.shared import Buffer, Vector
from pier_node.outer.codec.interface import BadCode, check_size, check_values


class Plain:
    """32 bits per value."""

    name = "none"
    lossy = False
    sparse = False

    def encode(self, values: Vector) -> Buffer:
        """A view of the values: nothing is copied."""
        return values.astype("<f4", copy=False).data.cast("B")

    def decode(self, data: Buffer, length: int) -> Vector:
        """A read-only view of `data`: nothing is copied."""
        check_size(self, data, length)
        return np.frombuffer(data, "<f4")

    def size(self, length: int) -> int:
        """See Codec."""
        return 4 * length


Halves = npt.NDArray[np.uint16]

INFINITY = 0x7F80
MINUS_INFINITY = 0xFF80
MAGNITUDE = 0x7FFF


class Bf16:
    """16 bits per value; relative error at most 2^-8 where it saturates, otherwise 2^-9 for normal values."""

    name = "bf16"
    lossy = True
    sparse = False

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        check_values(values)
        return to_bf16(values).astype("<u2", copy=False).tobytes()

    def decode(self, data: Buffer, length: int) -> Vector:
        """See Codec."""
        check_size(self, data, length)
        halves = np.frombuffer(data, "<u2")
        if (halves & MAGNITUDE).max() >= INFINITY:
            raise BadCode(f"{self.name}: a value is not finite")
        return from_bf16(halves)

    def size(self, length: int) -> int:
        """See Codec."""
        return 2 * length


def to_bf16(values: Vector) -> Halves:
    """Round finite values of any shape."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # ties go to even
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    halves = rounded.astype(np.uint16)
    if halves.max() == MINUS_INFINITY or halves.view(np.int16).max() == INFINITY:
        halves -= (halves & MAGNITUDE) == INFINITY
    return halves


def from_bf16(halves: Halves) -> Vector:
    """The exact values of finite bf16, in the same shape."""
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)
