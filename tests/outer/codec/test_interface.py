from __future__ import annotations

import numpy as np
from hypothesis import given
from outer.codec.samples import VECTORS

from pier_node.base.shared import Vector
from pier_node.outer.codec.interface import Plain


@given(VECTORS)
def test_nothing_is_lost(values: Vector) -> None:
    assert Plain().decode(Plain().encode(values), len(values)).tobytes() == values.tobytes()


def test_layout() -> None:
    assert Plain().encode(np.array([1, -2], np.float32)) == bytes.fromhex("0000803f 000000c0")


def test_decoding_copies_nothing() -> None:
    data = bytes(8)
    assert np.shares_memory(Plain().decode(data, 2), np.frombuffer(data, np.uint8))
