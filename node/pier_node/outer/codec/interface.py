"""The interface of all codecs, and the checks that they share.

The exchange encodes one chunk at a time, in worker threads: codecs hold no state except a generator, and spend their
time in NumPy, outside the interpreter's lock. Decoding is bit-identical on every machine: every operation rounds once,
nothing is fused, and no arithmetic yields a denormal, so a process that flushes denormals to zero gives the same bits.

Error feedback is not here: what a codec drops of an update is the residual in site/error_feedback.py, and
rounds/reduce.py computes it. Which codec a run uses is `outer.codec`; site/membership.py looks it up.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

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
    lossy: bool
    sparse: bool

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
