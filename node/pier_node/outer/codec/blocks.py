"""What the blockwise codecs share: values, or codes, in rows of one block each."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pier_node.shared import Vector

Number = TypeVar("Number", bound=np.generic)


def in_blocks(values: npt.NDArray[Number], block: int) -> npt.NDArray[Number]:
    """Shape [n] as [blocks, block]: a view, or a copy with zeros at the end where the last block is not full."""
    missing = -len(values) % block
    if missing:
        values = np.concatenate([values, np.zeros(missing, values.dtype)])
    return values.reshape(-1, block)


def block_maximum(values: Vector) -> Vector:
    """The largest of each row, shape [blocks, 1]; `reduceat` takes half the time of `max(axis=1)` on short rows."""
    return np.maximum.reduceat(values.ravel(), _starts(values))[:, None]


def block_minimum(values: Vector) -> Vector:
    """The smallest of each row, shape [blocks, 1]."""
    return np.minimum.reduceat(values.ravel(), _starts(values))[:, None]


def to_integers(quotients: Vector, rng: np.random.Generator | None) -> None:
    """Round in place: to nearest, or up or down by chance so that the expectation is the value itself."""
    if rng is None:
        np.rint(quotients, out=quotients)
    else:
        quotients += rng.random(quotients.shape, np.float32)
        np.floor(quotients, out=quotients)


def _starts(values: Vector) -> npt.NDArray[np.intp]:
    return np.arange(0, values.size, values.shape[1])
