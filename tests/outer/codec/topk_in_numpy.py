"""The top-k codec in NumPy: what the compiled loops compute, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pier_node.base.shared import Buffer, Vector
from pier_node.outer.codec.interface import (
    INFINITY,
    LARGEST,
    SMALLEST,
    BadCode,
    Halves,
    check_size,
    check_values,
    from_bf16,
    to_bf16,
)
from pier_node.outer.codec.topk import HEAD, UNARY, TopK
from pier_node.outer.codec.topk_loops import FITS

Bits = npt.NDArray[np.uint8]
"""One bit in each element."""
Indices = npt.NDArray[np.int64]


def index_bits(indices: Indices, density: int) -> Bits:
    """Encode indices below d·k, each row rising: [rows, k] to [rows, (2 + log2 d)·k]."""
    rows, count = indices.shape
    lower = spread((indices % density).astype(np.uint8), density.bit_length() - 1)
    unary = np.zeros((rows, UNARY * count), np.uint8)
    np.put_along_axis(unary, indices // density + np.arange(count), 1, axis=1)
    return np.concatenate([lower, unary], axis=1)


def read_indices(bits: Bits, length: int, density: int) -> Indices:
    """Decode indices, all below `length`: the inverse of `index_bits`. Raises BadCode."""
    width = density.bit_length() - 1
    count = bits.shape[1] // (width + UNARY)
    lower, unary = bits[:, : width * count], bits[:, width * count :]
    if (np.count_nonzero(unary, axis=1) != count).any():
        raise BadCode("there are more or fewer indices than there should be")
    upper = np.nonzero(unary)[1].reshape(-1, count) - np.arange(count)
    indices: Indices = upper * density + collect(lower, width)
    if (np.diff(indices, axis=1) <= 0).any() or indices.max() >= length:
        raise BadCode("an index is out of order or out of range")
    return indices


def spread(numbers: npt.NDArray[np.uint8], width: int) -> Bits:
    """The lowest `width` bits of numbers, the lowest bit first: [rows, n] to [rows, n·width]."""
    return np.unpackbits(numbers[..., None], axis=2, count=width, bitorder="little").reshape(len(numbers), -1)


def collect(bits: Bits, width: int) -> npt.NDArray[np.uint8]:
    """The inverse of `spread`: [rows, n·width] to [rows, n]."""
    grouped: npt.NDArray[Any] = bits.reshape(len(bits), -1, width)
    return np.packbits(grouped, axis=2, bitorder="little")[..., 0]


Codes = npt.NDArray[np.uint8]
Exact = npt.NDArray[np.float64]

_SMALLEST = int(to_bf16(np.array([SMALLEST], np.float32))[0])


def fit(magnitudes: Vector, top: int) -> tuple[Halves, Codes]:
    """Low and step of each row, shape [rows, 2], and codes in 0..top, shape [rows, n]."""
    exact = magnitudes.astype(np.float64)
    low = exact.min(axis=1, keepdims=True)
    step = (exact.max(axis=1, keepdims=True) - low) / top
    for _ in range(FITS):
        low, step = _regression(exact, _nearest(exact, low, step, top))
    line = np.concatenate([low, step], axis=1).astype(np.float32)
    line[line < SMALLEST] = 0
    halves = to_bf16(line)
    rounded = from_bf16(halves).astype(np.float64)
    return halves, _nearest(exact, rounded[:, :1], rounded[:, 1:], top).astype(np.uint8)


def levels(halves: Halves, top: int) -> Vector:
    """The levels of each row, [rows, 2] to [rows, top + 1]. Raises BadCode."""
    if ((halves >= INFINITY) | (halves != 0) & (halves < _SMALLEST)).any():
        raise BadCode("a level is out of range")
    low, step = np.hsplit(from_bf16(halves), 2)
    with np.errstate(over="ignore"):
        found = step * np.arange(top + 1, dtype=np.float32)
        found += low
    return np.minimum(found, LARGEST, out=found)


def _nearest(magnitudes: Exact, low: Exact, step: Exact, top: int) -> Exact:
    """The code of the level nearest to each magnitude; 0 where all levels are equal."""
    codes = np.divide(magnitudes - low, step, out=np.zeros_like(magnitudes), where=step > 0)
    np.rint(codes, out=codes)
    return np.clip(codes, 0, top, out=codes)


def _regression(magnitudes: Exact, codes: Exact) -> tuple[Exact, Exact]:
    """The least-squares line through (code, magnitude), row by row; flat where all codes are equal."""
    count = magnitudes.shape[1]
    mean, centre = _sum(magnitudes) / count, _sum(codes) / count
    deviations = codes - centre
    slope = _sum(deviations * magnitudes) / np.maximum(_sum(deviations**2), np.finfo(np.float64).tiny)
    return mean - slope * centre, slope


def _sum(rows: Exact) -> Exact:
    """From the first to the last."""
    return rows.cumsum(axis=1)[:, -1:]


class NumpyTopK(TopK):
    """Top-k without the loops."""

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        check_values(values)
        return b"".join(self._encode(values[part].reshape(shape)) for part, shape, _ in self._parts(len(values)))

    def decode(self, data: Buffer, length: int) -> Vector:
        """See Codec."""
        check_size(self, data, length)
        values, code = np.zeros(length, np.float32), np.frombuffer(data, np.uint8)
        for part, shape, place in self._parts(length):
            self._decode(code[place].reshape(shape[0], -1), out=values[part].reshape(shape))
        return values

    def _encode(self, blocks: Vector) -> bytes:
        """The code of values, shape [blocks, block]."""
        indices = largest(blocks, self._kept(blocks.shape[1]))
        values = np.take_along_axis(blocks, indices, axis=1)
        head, codes = fit(np.abs(values), (1 << self._bits - 1) - 1)
        fields = (codes << 1 | np.signbit(values)).astype(np.uint8)
        bits = np.concatenate([index_bits(indices, self._density), spread(fields, self._bits)], axis=1)
        packed = np.packbits(bits, axis=1, bitorder="little")
        return np.concatenate([head.astype("<u2", copy=False).view(np.uint8), packed], axis=1).tobytes()

    def _decode(self, code: npt.NDArray[np.uint8], out: Vector) -> None:
        """Write the kept values of blocks, shape [blocks, block], into zeros."""
        kept = self._kept(out.shape[1])
        indexed = kept * (self._lower + UNARY)
        end = indexed + kept * self._bits
        table = levels(np.ascontiguousarray(code[:, :HEAD]).view("<u2"), (1 << self._bits - 1) - 1)
        bits = np.unpackbits(code[:, HEAD:], axis=1, bitorder="little")
        if bits[:, end:].any():
            raise BadCode("there are bits too many")
        indices = read_indices(bits[:, :indexed], out.shape[1], self._density)
        fields = collect(bits[:, indexed:end], self._bits)
        values = np.take_along_axis(table, fields.astype(np.intp) >> 1, axis=1)
        np.negative(values, out=values, where=(fields & 1).astype(bool))
        np.put_along_axis(out, indices, values, axis=1)


def largest(values: Vector, count: int) -> Indices:
    """Rising indices of each row's `count` largest magnitudes, first of equals: [rows, n] to [rows, count]."""
    rows, length = values.shape
    magnitudes = np.abs(values)
    magnitudes.partition(length - count, axis=1)
    thresholds = magnitudes[:, length - count, None].copy()
    np.abs(values, out=magnitudes)  # computed again, which is faster than a second vector
    chosen = magnitudes >= thresholds
    flat = np.flatnonzero(chosen)
    if len(flat) > rows * count:
        tied = np.count_nonzero(chosen, axis=1) > count
        chosen[tied] = _first_of_equals(magnitudes[tied], thresholds[tied], count)
        flat = np.flatnonzero(chosen)
    indices: Indices = flat.reshape(rows, count) % length
    return indices


def _first_of_equals(magnitudes: Vector, thresholds: Vector, count: int) -> npt.NDArray[np.bool_]:
    """The choice in rows where more than `count` magnitudes reach the threshold."""
    above, equal = magnitudes > thresholds, magnitudes == thresholds
    room = count - np.count_nonzero(above, axis=1, keepdims=True)
    chosen: npt.NDArray[np.bool_] = above | equal & (np.cumsum(equal, axis=1) <= room)
    return chosen
