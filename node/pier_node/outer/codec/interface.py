"""What every codec does, the checks that codecs share, and the two without blocks: plain fp32 and bfloat16.

The exchange encodes chunks in worker threads: codecs hold no state except a generator, and spend their time in NumPy or
compiled loops, outside the interpreter's lock. Decoding is bit-identical on every machine: every operation rounds once,
nothing is fused, and no arithmetic yields a denormal, so a process that flushes denormals to zero gives the same bits.

Plain is little-endian fp32, neither copied nor checked: whoever adds the values up checks their norm. Bf16 is the upper
half of an fp32, rounded to nearest even; a value that would become infinite becomes the largest bf16 instead.

Error feedback is not here: what a codec drops of an update is the residual in site/error_feedback.py, and
rounds/reduce.py computes it. Which codec a run uses is `outer.codec`; site/membership.py looks it up.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pier_node.base.shared import Buffer, Vector

LARGEST = np.finfo(np.float32).max
SMALLEST = np.finfo(np.float32).tiny
"""The smallest normal fp32; a smaller scale counts as zero."""


class BadCode(ValueError):
    """Bytes that no encoder produces."""


class Codec(Protocol):
    """A way to encode fp32 values in fewer bytes.

    Attributes:
        name: its name in the configuration.
        lossy: whether decoded values differ from the encoded ones, so that error feedback is useful.
        sparse: whether it keeps a few of the values only, so that a mean must not be encoded by it: see `of_means`.
    """

    name: str
    lossy: bool = True
    sparse: bool = False

    def encode(self, values: Vector) -> Buffer:
        """Encode fp32 values, shape [n >= 1], maybe as a view of them. Raises ValueError if a value is not finite."""

    def decode(self, data: Buffer, length: int) -> Vector:
        """Decode `length` finite fp32 values, maybe read-only. Raises BadCode for bytes that `encode` cannot produce.

        `none` is an exception: it checks no value, neither here nor in `encode`.
        """

    def size(self, length: int) -> int:
        """Size in bytes of the code of `length` values."""


def check_values(values: Vector) -> None:
    """Refuse values that cannot be encoded."""
    if not len(values):
        raise ValueError("there are no values to encode")
    if not np.isfinite(values).all():
        raise ValueError("a value to encode is not finite")


def check_size(codec: Codec, data: Buffer, length: int) -> None:
    """Refuse a code whose size does not fit `length` values, before any memory is allocated for them."""
    if length < 1 or len(data) != codec.size(length):
        raise BadCode(f"{codec.name}: {len(data)} bytes for {length} values")


class Plain(Codec):
    """32 bits per value."""

    name = "none"
    lossy = False

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


class Bf16(Codec):
    """16 bits per value; relative error at most 2^-8 where it saturates, otherwise 2^-9 for normal values."""

    name = "bf16"

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


class Rounded:
    """fp32 values that are kept as bf16: each is rounded to the nearest, ties to even, when it is written.

    Args:
        halves: what is kept, shape [n].
    """

    def __init__(self, halves: Halves) -> None:
        self._halves = halves

    def __len__(self) -> int:
        return len(self._halves)

    def __getitem__(self, part: slice) -> Vector:
        """A copy of some values."""
        return from_bf16(self._halves[part])

    def __setitem__(self, part: slice, values: Vector | float) -> None:
        """Write finite values, or one of them everywhere."""
        if len(place := self._halves[part]):
            place[:] = to_bf16(np.atleast_1d(np.asarray(values, np.float32)))


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
