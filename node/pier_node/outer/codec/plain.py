"""No compression: little-endian fp32, neither copied nor looked at: whoever adds the values up checks their norm."""

from __future__ import annotations

import numpy as np

from pier_node.outer.codec.interface import check_size
from pier_node.shared import Vector


class Plain:
    """32 bits a value."""

    name = "none"
    lossy = False

    def encode(self, values: Vector) -> bytes:
        """See Codec."""
        return values.astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes, length: int) -> Vector:
        """A read-only view of `data`: nothing is copied."""
        check_size(self, data, length)
        return np.frombuffer(data, "<f4")

    def size(self, length: int) -> int:
        """See Codec."""
        return 4 * length
