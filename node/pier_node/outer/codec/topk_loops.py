"""How the top-k codec computes, in compiled loops; topk.py describes its code, and puts it together.

Every operation rounds once, and sums go from the first to the last: nothing is fused or reordered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from pier_node.base.compiling import Compiler, read, written
from pier_node.base.shared import Vector
from pier_node.outer.codec import interface

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]
Exact = npt.NDArray[np.float64]

FITS = 2
"""Number of regressions: the first lowers the error of 2-bit values by 45 %, the second by 5 %; a third, by 2 %."""
GROUP = 16
"""Values that are compared with each other first; of so many, one is kept at most on average."""

GOOD, BAD_LEVEL, BAD_END, BAD_COUNT, BAD_ORDER = range(5)
"""What `decode` returns; REASONS says it in words."""
REASONS = {
    BAD_LEVEL: "a level is out of range",
    BAD_END: "there are bits too many",
    BAD_COUNT: "there are more or fewer indices than there should be",
    BAD_ORDER: "an index is out of order or out of range",
}

LARGEST, SMALLEST = np.float32(interface.LARGEST), np.float32(interface.SMALLEST)
MAGNITUDE = np.int32(0x7FFFFFFF)
_BF16_INFINITY = interface.INFINITY
_BF16_SMALLEST = int(interface.to_bf16(np.array([SMALLEST], np.float32))[0])
_TINY = float(np.finfo(np.float64).tiny)

_compiler = Compiler("topk", [Path(__file__)])
compiled, inlined = _compiler.typed, _compiler.inlined


@compiled(types.int32, written(types.int32), types.int64, types.int64)
def _kth_largest(numbers: Integers, length: int, k: int) -> Any:
    """The k-th largest (from 1) of the first `length` numbers, which it reorders; Hoare's quickselect."""
    left, right, at = 0, length - 1, k - 1
    while left < right:
        first, middle, last = numbers[left], numbers[(left + right) // 2], numbers[right]
        pivot = max(min(first, middle), min(max(first, middle), last))
        i, j = left, right
        while i <= j:
            while numbers[i] > pivot:
                i += 1
            while numbers[j] < pivot:
                j -= 1
            if i <= j:
                numbers[i], numbers[j] = numbers[j], numbers[i]
                i, j = i + 1, j - 1
        if at <= j:
            right = j
        elif at >= i:
            left = i
        else:
            break
    return numbers[at]


@inlined
def _maximum(row: Integers, start: int, count: int) -> np.int32:
    """The largest of so many magnitudes: a constant count makes vector instructions of it."""
    largest = np.int32(0)
    for at in range(count):
        largest = np.int32(max(largest, np.int32(row[start + at] & MAGNITUDE)))
    return largest


@compiled(types.void, read(types.int32), written(types.int32, 2), written(types.int32))
def _largest(row: Integers, scratch: Integers, indices: Integers) -> None:
    """Find the rising indices of the largest magnitudes, the first of equal ones, as many as `indices` has room for.

    As many groups of values have a maximum of at least the k-th largest maximum as values are wanted. So no value below
    that is among the wanted ones, and few are above.

    Args:
        row: the bits of the values, shape [block].
        scratch: shape [3, block + 1].
    """
    maxima, numbers, places = scratch[0], scratch[1], scratch[2]
    length, kept = len(row), len(indices)
    groups = -(-length // GROUP)
    for number in range(length // GROUP):
        maxima[number] = _maximum(row, number * GROUP, GROUP)
    if length % GROUP:
        maxima[groups - 1] = _maximum(row, length - length % GROUP, length % GROUP)
    numbers[:groups] = maxima[:groups]
    least, found = _kth_largest(numbers, groups, kept), 0
    for number in range(groups):
        if maxima[number] >= least:
            for at in range(number * GROUP, min(number * GROUP + GROUP, length)):
                places[found] = at  # stays if it counts: faster than a branch
                found += np.int32(row[at] & MAGNITUDE) >= least
    for at in range(found):
        maxima[at] = numbers[at] = np.int32(row[places[at]] & MAGNITUDE)
    threshold, equals, count = _kth_largest(numbers, found, kept), kept, 0
    for at in range(kept):
        equals -= numbers[at] > threshold
    for at in range(found):
        if maxima[at] > threshold or (maxima[at] == threshold and equals > 0):
            equals -= maxima[at] == threshold
            indices[count] = places[at]
            count += 1


@compiled(types.void, read(types.float64), types.float64, types.float64, types.float64, written(types.float64))
def _nearest(magnitudes: Exact, low: float, step: float, top: float, codes: Exact) -> None:
    """Write the code of the level nearest to each magnitude; 0 where all levels are equal."""
    for at in range(len(codes)):
        code = np.rint((magnitudes[at] - low) / step) if step > 0 else 0.0
        codes[at] = min(max(code, 0.0), top)


@compiled(types.uint16, types.float64)
def _to_bf16(value: float) -> Any:
    """See `to_bf16`; below the smallest normal value, zero."""
    rounded = np.empty(1, np.float32)
    rounded[0] = value
    if rounded[0] < SMALLEST:
        return np.uint16(0)
    bits = int(rounded.view(np.int32)[0])
    return np.uint16(min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, _BF16_INFINITY - 1))


@compiled(types.float32, types.uint16)
def _from_bf16(half: np.uint16) -> Any:
    bits = np.empty(1, np.uint32)
    bits[0] = np.uint32(half) << np.uint32(16)
    return bits.view(np.float32)[0]


@compiled(types.void, read(types.float64), types.int64, written(types.uint16), written(types.float64))
def _fit(magnitudes: Exact, top: int, line: interface.Halves, codes: Exact) -> None:
    """Write low and step of the levels, and the code of each magnitude."""
    count = len(codes)
    low, high = magnitudes[0], magnitudes[0]
    for magnitude in magnitudes:
        low, high = min(low, magnitude), max(high, magnitude)
    step = (high - low) / top
    for _ in range(FITS):  # the least-squares line through (code, magnitude), flat where all codes are equal
        _nearest(magnitudes, low, step, top, codes)
        mean, centre = 0.0, 0.0
        for at in range(count):
            mean, centre = mean + magnitudes[at], centre + codes[at]
        mean, centre, spread, product = mean / count, centre / count, 0.0, 0.0
        for at in range(count):
            deviation = codes[at] - centre
            spread, product = spread + deviation * deviation, product + deviation * magnitudes[at]
        step = product / max(spread, _TINY)
        low = mean - step * centre
    line[0], line[1] = _to_bf16(low), _to_bf16(step)
    _nearest(magnitudes, _from_bf16(line[0]), _from_bf16(line[1]), top, codes)


@inlined
def _put(bits: Bytes, at: int, number: int) -> None:
    """Write a number of at most 8 bits where there are only zeros, its lowest bit first."""
    shifted = number << (at & 7)
    bits[at >> 3] |= np.uint8(shifted & 255)
    if shifted > 255:
        bits[(at >> 3) + 1] |= np.uint8(shifted >> 8)


@inlined
def _get(bits: Bytes, at: int, width: int) -> Any:
    """The number of at most 8 bits that is written there."""
    found, offset = np.int64(bits[at >> 3]) >> (at & 7), at & 7
    if offset + width > 8:
        found |= np.int64(bits[(at >> 3) + 1]) << (8 - offset)
    return found & ((1 << width) - 1)


@compiled(
    types.void, read(types.float32, 2), types.int64, types.int64, written(types.uint16, 2), written(types.uint8, 2)
)
def encode(blocks: Vector, lower: int, bits: int, lines: interface.Halves, fields: Bytes) -> None:
    """Write low and step of each block's levels, shape [blocks, 2], and indices and values.

    Args:
        blocks: finite values, shape [blocks, block].
        lower: bits of an index that are written as they are: one value in 2 ** lower is kept.
        bits: bits of a value, its sign among them.
        fields: zeros, shape [blocks, bytes of indices and values].
    """
    rows, length, top = blocks.view(np.int32), blocks.shape[1], (1 << bits - 1) - 1
    kept = -(-length >> lower)
    scratch, indices = np.empty((3, length + 1), np.int32), np.empty(kept, np.int32)
    magnitudes, codes = np.empty(kept, np.float64), np.empty(kept, np.float64)
    unary, values = lower * kept, lower * kept + 2 * kept
    for block in range(len(blocks)):
        _largest(rows[block], scratch, indices)
        for rank in range(kept):
            magnitudes[rank] = abs(blocks[block, indices[rank]])
        _fit(magnitudes, top, lines[block], codes)
        field = fields[block]
        for rank in range(kept):
            index = int(indices[rank])
            _put(field, lower * rank, index & ((1 << lower) - 1))
            _put(field, unary + rank + (index >> lower), 1)
            _put(field, values + bits * rank, int(codes[rank]) << 1 | int(rows[block, index] < 0))


@compiled(types.int64, read(types.uint8), types.int64, types.int64, types.int64, written(types.int64))
def _read_indices(field: Bytes, kept: int, lower: int, length: int, indices: Any) -> Any:
    """Decode the indices: the inverse of what `encode` writes. Returns GOOD, or what is wrong."""
    unary, count = lower * kept, 0
    for at in range(2 * kept):
        count += _get(field, unary + at, 1)
    if count != kept:
        return BAD_COUNT
    rank, last = 0, np.int64(-1)
    for at in range(2 * kept):
        if _get(field, unary + at, 1):
            index = np.int64((at - rank) << lower | _get(field, lower * rank, lower))
            if index <= last or index >= length:
                return BAD_ORDER
            indices[rank] = last = index
            rank += 1
    return GOOD


@compiled(types.int64, read(types.uint16, 2), read(types.uint8, 2), types.int64, types.int64, written(types.float32, 2))
def decode(lines: interface.Halves, fields: Bytes, lower: int, bits: int, out: Vector) -> Any:
    """Write the kept values of each block into zeros, shape [blocks, block]. Returns GOOD, or what is wrong.

    Args: as of `encode`.
    """
    kept = -(-out.shape[1] >> lower)
    indices, table = np.empty(kept, np.int64), np.empty(1 << bits - 1, np.float32)
    values = lower * kept + 2 * kept
    end = values + bits * kept
    for block in range(len(out)):
        low, step = lines[block]
        for half in (low, step):
            if half >= _BF16_INFINITY or 0 < half < _BF16_SMALLEST:
                return BAD_LEVEL
        for number in range(len(table)):
            table[number] = min(np.float32(_from_bf16(step) * np.float32(number)) + _from_bf16(low), LARGEST)
        field = fields[block]
        if end & 7 and field[end >> 3] >> (end & 7):
            return BAD_END
        wrong = _read_indices(field, kept, lower, out.shape[1], indices)
        if wrong != GOOD:
            return wrong
        for rank in range(kept):
            number = _get(field, values + bits * rank, bits)
            value = table[number >> 1]
            out[block, indices[rank]] = -value if number & 1 else value
    return GOOD
