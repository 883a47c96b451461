"""Chunked top-k: of every 4096 values the 64 largest in magnitude, each with a sign and a magnitude of few bits.

As in SparseLoCo (arXiv 2508.15706), but for two things: an index takes 8 bits instead of 12 (elias_fano.py), and the
levels of a block begin near the smallest value that is kept, not at zero (levels.py).

Layout, block by block: the levels, then bits: the indices, and of each value its sign and its code. A last block of
fewer than 4096 values keeps one in 64, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pier_node.outer.codec.elias_fano import BITS, DENSITY, Indices, collect, index_bits, read_indices, spread
from pier_node.outer.codec.interface import BadCode, check_size, check_values
from pier_node.outer.codec.levels import fit, levels
from pier_node.shared import Vector

BLOCK = 4096
HEAD = 4
"""Bytes of a block's levels."""


class TopK:
    """0.195 bits a value with 4-bit values (164x less than fp32), 0.164 with 2-bit ones (195x).

    Args:
        bits: of a value, its sign among them.
    """

    lossy = True

    def __init__(self, name: str, bits: int) -> None:
        self.name = name
        self._bits = bits
        self._top = (1 << bits - 1) - 1

    def encode(self, values: Vector) -> bytes:
        """See Codec. Of equal magnitudes the first are kept."""
        check_values(values)
        return b"".join(self._encode(values[part].reshape(shape)) for part, shape in _parts(len(values)))

    def decode(self, data: bytes, length: int) -> Vector:
        """See Codec."""
        check_size(self, data, length)
        values, code = np.zeros(length, np.float32), np.frombuffer(data, np.uint8)
        for part, (blocks, block) in _parts(length):
            end = blocks * self._size(block)
            self._decode(code[:end].reshape(blocks, -1), out=values[part].reshape(blocks, block))
            code = code[end:]
        return values

    def size(self, length: int) -> int:
        """See Codec."""
        return sum(blocks * self._size(block) for _, (blocks, block) in _parts(length))

    def _size(self, block: int) -> int:
        return HEAD - (-_kept(block) * (BITS + self._bits) // 8)

    def _encode(self, blocks: Vector) -> bytes:
        """The code of values, shape [blocks, block]."""
        indices = largest(blocks, _kept(blocks.shape[1]))
        values = np.take_along_axis(blocks, indices, axis=1)
        head, codes = fit(np.abs(values), self._top)
        fields = (codes << 1 | np.signbit(values)).astype(np.uint8)
        bits = np.concatenate([index_bits(indices), spread(fields, self._bits)], axis=1)
        packed = np.packbits(bits, axis=1, bitorder="little")
        return np.concatenate([head.astype("<u2", copy=False).view(np.uint8), packed], axis=1).tobytes()

    def _decode(self, code: npt.NDArray[np.uint8], out: Vector) -> None:
        """Write the values of blocks that were kept into zeros, shape [blocks, block]."""
        kept = _kept(out.shape[1])
        table = levels(np.ascontiguousarray(code[:, :HEAD]).view("<u2"), self._top)
        bits = np.unpackbits(code[:, HEAD:], axis=1, bitorder="little")
        if bits[:, kept * (BITS + self._bits) :].any():
            raise BadCode("there are bits too many")
        indices = read_indices(bits[:, : kept * BITS], out.shape[1])
        fields = collect(bits[:, kept * BITS : kept * (BITS + self._bits)], self._bits)
        values = np.take_along_axis(table, fields.astype(np.intp) >> 1, axis=1)
        np.negative(values, out=values, where=(fields & 1).astype(bool))
        np.put_along_axis(out, indices, values, axis=1)


def largest(values: Vector, count: int) -> Indices:
    """Rising indices of the `count` largest magnitudes of each row, the first of equals: [rows, n] to [rows, count]."""
    rows, length = values.shape
    magnitudes = np.abs(values)
    magnitudes.partition(length - count, axis=1)
    thresholds = magnitudes[:, length - count, None].copy()
    np.abs(values, out=magnitudes)  # again, which is faster than a second vector
    chosen = magnitudes >= thresholds
    flat = np.flatnonzero(chosen)
    if len(flat) > rows * count:
        tied = np.count_nonzero(chosen, axis=1) > count
        chosen[tied] = _first_of_equals(magnitudes[tied], thresholds[tied], count)
        flat = np.flatnonzero(chosen)
    indices: Indices = flat.reshape(rows, count) % length
    return indices


def _first_of_equals(magnitudes: Vector, thresholds: Vector, count: int) -> npt.NDArray[np.bool_]:
    """What is chosen of rows where more than `count` magnitudes reach the threshold."""
    above, equal = magnitudes > thresholds, magnitudes == thresholds
    room = count - np.count_nonzero(above, axis=1, keepdims=True)
    chosen: npt.NDArray[np.bool_] = above | equal & (np.cumsum(equal, axis=1) <= room)
    return chosen


def _kept(block: int) -> int:
    return -(-block // DENSITY)


def _parts(length: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """The whole blocks of a vector and the rest: where it lies, and its shape [blocks, block]."""
    whole = length // BLOCK * BLOCK
    if whole:
        yield slice(0, whole), (whole // BLOCK, BLOCK)
    if whole < length:
        yield slice(whole, length), (1, length - whole)
