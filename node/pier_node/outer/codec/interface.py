"""What every codec does, and the checks that they share.

The exchange encodes a chunk at a time, in worker threads: codecs hold no state but a generator, and spend their time in
NumPy, outside the interpreter's lock. Decoding is bit-identical on every machine: one rounding an operation, nothing
fused, and no denormal comes out of arithmetic, so that a process that flushes them to zero makes no difference.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pier_node.base.shared import Vector

LARGEST = np.finfo(np.float32).max
SMALLEST = np.finfo(np.float32).tiny
"""The smallest normal fp32: a scale below it counts as zero."""


class BadCode(ValueError):
    """Bytes that no encoder makes."""


class Codec(Protocol):
    """A way to write fp32 values in fewer bytes.

    Attributes:
        name: what the configuration calls it.
        lossy: whether decoding gives other values than were encoded, so that error feedback makes sense.
    """

    name: str
    lossy: bool

    def encode(self, values: Vector) -> bytes:
        """The code of fp32 values, shape [n >= 1]. Raises ValueError where one is not finite."""

    def decode(self, data: bytes, length: int) -> Vector:
        """`length` finite fp32 values, maybe read-only. Raises BadCode for what `encode` cannot have made.

        `none` is exempt: it looks at no value, neither here nor in `encode`.
        """

    def size(self, length: int) -> int:
        """Bytes of the code of `length` values."""


def check_values(values: Vector) -> None:
    """Refuse what cannot be encoded."""
    if not len(values):
        raise ValueError("there are no values to encode")
    if not np.isfinite(values).all():
        raise ValueError("a value to encode is not finite")


def check_size(codec: Codec, data: bytes, length: int) -> None:
    """Refuse a code of another size than that of `length` values, before memory is taken for them."""
    if length < 1 or len(data) != codec.size(length):
        raise BadCode(f"{codec.name}: {len(data)} bytes for {length} values")
