"""Chunked top-k: of every 4096 values it keeps the 64 largest in magnitude, as a sign and a few bits each.

As in SparseLoCo (arXiv 2508.15706), with two differences: an index takes 8 bits instead of 12, and the levels of a
block start near the smallest value that is kept, not at zero. One in 64 is the usual density d; it may be another power
of two.

Layout, block by block: the levels, then bits: all indices, then the sign and code of each value. A last block of fewer
than 4096 values keeps one in d, rounded up.

Indices rise, and take 2 + log2 d bits each in the code of Elias (1974) and Fano (1971) for k indices below d·k. The
lower log2 d bits of an index are written as they are. The upper bits are below k and never fall from one index to the
next: they are written as 2k bits, of which bit `rank + upper` is set for each index. At d = k = 64, with 8 bits, no
code can take less than log2 C(4096, 64) / 64 = 7.4 bits per index; a plain index takes 12.

Levels are evenly spaced, for magnitudes far from zero: `low + code · step`, both bf16, fitted row by row by alternating
least squares. Given the codes, the best line is a regression of the magnitudes on them; given the line, the best codes
are the nearest levels (Lloyd, 1982, with levels on a line).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pier_node.base.shared import Buffer, Vector
from pier_node.outer.codec.interface import BadCode, Codec, check_size, check_values

DENSITY = 64
"""One value in this many is kept, unless another density is asked for."""
BLOCK = 4096
HEAD = 4
"""Bytes of a block's levels."""
UNARY = 2
"""Bits of an index on top of its lower ones."""


class TopK(Codec):
    """Top-k codec: 0.195 bits per value with 4-bit values (164x less than fp32), 0.164 with 2-bit values (195x).

    Args:
        bits: bits per kept value, including its sign.
        density: one value in this many is kept: a power of two, at most 256.
    """

    sparse = True

    def __init__(self, name: str, bits: int, density: int = DENSITY) -> None:
        self.name = name
        self._bits, self._density = bits, density
        self._lower = density.bit_length() - 1

    def encode(self, values: Vector) -> bytes:
        """See Codec. Of equal magnitudes, the first ones are kept."""
        from pier_node.outer.codec import topk_loops  # with numba: see get_ready

        check_values(values)
        code = np.empty(self.size(len(values)), np.uint8)
        for part, (blocks, block), place in self._parts(len(values)):
            lines, fields = np.empty((blocks, 2), np.uint16), np.zeros((blocks, self._size(block) - HEAD), np.uint8)
            topk_loops.encode(values[part].reshape(blocks, block), self._lower, self._bits, lines, fields)
            out = code[place].reshape(blocks, -1)
            out[:, :HEAD], out[:, HEAD:] = lines.astype("<u2", copy=False).view(np.uint8), fields
        return code.tobytes()

    def decode(self, data: Buffer, length: int) -> Vector:
        """See Codec."""
        from pier_node.outer.codec import topk_loops  # with numba

        check_size(self, data, length)
        values, code = np.zeros(length, np.float32), np.frombuffer(data, np.uint8)
        for part, (blocks, block), place in self._parts(length):
            rows = code[place].reshape(blocks, -1)
            lines, fields = rows[:, :HEAD].copy().view("<u2").astype(np.uint16, copy=False), rows[:, HEAD:].copy()
            out = values[part].reshape(blocks, block)
            wrong = topk_loops.decode(lines, fields, self._lower, self._bits, out)
            if wrong != topk_loops.GOOD:
                raise BadCode(topk_loops.REASONS[wrong])
        return values

    def size(self, length: int) -> int:
        """See Codec."""
        whole, rest = divmod(length, BLOCK)
        return whole * self._size(BLOCK) + (self._size(rest) if rest else 0)

    def _size(self, block: int) -> int:
        return HEAD - (-self._kept(block) * (self._lower + UNARY + self._bits) // 8)

    def _kept(self, block: int) -> int:
        return -(-block // self._density)

    def _parts(self, length: int) -> Iterator[tuple[slice, tuple[int, int], slice]]:
        """The whole blocks of a vector, then the rest: slice and shape [blocks, block], and slice of the code."""
        whole = length // BLOCK
        middle, end = whole * BLOCK, whole * self._size(BLOCK)
        if whole:
            yield slice(0, middle), (whole, BLOCK), slice(0, end)
        if middle < length:
            yield slice(middle, length), (1, length - middle), slice(end, None)
