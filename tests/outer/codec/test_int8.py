from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from outer.codec.samples import LARGEST, VECTORS, relative_error, vector
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.codec import BadCode
from pier_node.outer.codec.blockwise import INT8_BLOCK, Int8

ONE = 0x3F80
"""A scale of 1, in bf16."""


def code(scale: int, *codes: int) -> bytes:
    return scale.to_bytes(2, "little") + np.array(codes, np.int8).tobytes()


def round_trip(values: Vector, coder: Int8) -> Vector:
    return coder.decode(coder.encode(values), len(values))


def absmax(values: Vector) -> Vector:
    """Of the block of each value."""
    parts = [values[start : start + INT8_BLOCK] for start in range(0, len(values), INT8_BLOCK)]
    return np.concatenate([np.full(len(part), np.abs(part).max()) for part in parts])


@given(VECTORS)
@settings(deadline=None)
def test_error_is_at_most_half_a_scale(values: Vector) -> None:
    scales = absmax(values).astype(np.float64) / 127 * (1 + 2**-8)
    error = np.abs(values.astype(np.float64) - round_trip(values, Int8()))
    assert (error <= np.maximum(scales / 2 * (1 + 1e-5), 2.0**-119)).all()


@given(VECTORS)
@settings(deadline=None)
def test_is_idempotent(values: Vector) -> None:
    once = round_trip(values, Int8())
    assert (round_trip(once, Int8()) == once).all()


def test_golden() -> None:
    data = Int8().encode(fp32(127, -127, 1.4, 1.6, 0, -0.4))
    assert data == code(ONE, 127, -127, 1, 2, 0, 0)
    assert Int8().decode(data, 6).tolist() == [127, -127, 1, 2, 0, 0]
    assert Int8().encode(np.zeros(3, np.float32)) == bytes(5)


def test_every_block_has_its_scale() -> None:
    values = np.concatenate([np.full(INT8_BLOCK, 1e-20), np.full(INT8_BLOCK, 1e20), [3.0]]).astype(np.float32)
    np.testing.assert_allclose(round_trip(values, Int8()), values, rtol=1 / 254)


def test_error_on_known_distributions() -> None:
    assert relative_error(vector("normal", 262_144), round_trip(vector("normal", 262_144), Int8())) < 0.0068
    assert Int8().size(262_144) * 8 / 262_144 == 8.125


@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x8000, 0x007F, 0x7C02, 0x7F7F])
def test_scales_that_no_block_has_are_refused(scale: int) -> None:
    with pytest.raises(BadCode, match="scale is out of range"):
        Int8().decode(code(scale, 1), 1)


@pytest.mark.parametrize("scale", [0x0080, 0x7C01])
def test_extreme_scales(scale: int) -> None:
    assert np.isfinite(Int8().decode(code(scale, 127, -127), 2)).all()
    assert Int8().encode(fp32(LARGEST))[:2] == code(0x7C01)


@pytest.mark.parametrize(("scale", "value"), [(ONE, -128), (0, 1), (0, -1)])
def test_codes_that_no_value_has_are_refused(scale: int, value: int) -> None:
    with pytest.raises(BadCode, match="code is out of range"):
        Int8().decode(code(scale, 0, value), 2)
