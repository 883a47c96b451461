from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outer.codec import int4_in_numpy
from outer.codec.samples import LARGEST, VECTORS, relative_error, vector
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.codec import BadCode
from pier_node.outer.codec.blockwise import INT4_BLOCK, Int4

ONE = 0x7F00
"""A step of 1 with its zero at 0: sign-less exponent and 4 bits of mantissa, then 4 bits of zero."""


def code(head: int, *packed: int) -> bytes:
    return head.to_bytes(2, "little") + bytes(packed)


def step(value: float) -> int:
    """The head of a step that 4 bits of mantissa can hold."""
    return int(np.array(value, np.float32).view(np.uint32)) >> 15


def round_trip(values: Vector, coder: Int4) -> Vector:
    return coder.decode(coder.encode(values), len(values))


def span(values: Vector) -> Vector:
    """Highest - lowest, 0 among them, of the block of each value; fp64."""
    parts = [values[start : start + INT4_BLOCK].astype(np.float64) for start in range(0, len(values), INT4_BLOCK)]
    return np.concatenate([np.full(len(part), part.max(initial=0) - part.min(initial=0)) for part in parts])


@given(VECTORS)
@settings(deadline=None)
def test_error_is_at_most_half_a_step(values: Vector) -> None:
    steps = span(values) / 15 * (1 + 2**-4)
    error = np.abs(values.astype(np.float64) - round_trip(values, Int4()))
    assert (error <= np.maximum(steps / 2 * (1 + 1e-5), 2.0**-122)).all()


@given(VECTORS)
@settings(deadline=None)
def test_zeros_stay_zeros_and_signs_never_change(values: Vector) -> None:
    assert (round_trip(values, Int4()) * np.sign(values) >= 0).all()
    assert (round_trip(values, Int4())[values == 0] == 0).all()


def test_golden() -> None:
    assert step(1) == ONE
    values = fp32(0, 15, 1.4, 1.6, 7)
    data = Int4().encode(values)
    assert data == code(ONE, 0x20, 0x7F, 0x01), "values 0 to 2 in the low halves, 3 and 4 in the high ones"
    assert Int4().decode(data, 5).tolist() == [0, 15, 1, 2, 7]
    assert Int4().decode(code(ONE | 5, 0xF0), 2).tolist() == [-5, 10]
    assert Int4().encode(fp32(-5, 10)) == code(ONE | 5, 0xF0)
    assert Int4().encode(np.zeros(3, np.float32)) == bytes(4)


def test_both_ends_half_a_step_beyond_the_levels() -> None:
    assert round_trip(fp32(7.5, -7.5), Int4()).tolist() == [7, -8]


def test_a_step_is_rounded_up() -> None:
    assert Int4().encode(fp32(15.001))[:2] == code(step(1 + 1 / 16))
    assert Int4().encode(fp32(15 * (1 + 1 / 16)))[:2] == code(step(1 + 1 / 16))


def test_every_block_has_its_step() -> None:
    values = np.concatenate([np.full(INT4_BLOCK, 1e-20), np.full(INT4_BLOCK, -1e20), [3.0]]).astype(np.float32)
    np.testing.assert_allclose(round_trip(values, Int4()), values, rtol=1.07 / 30)


def test_error_on_known_distributions() -> None:
    assert relative_error(vector("normal", 262_144), round_trip(vector("normal", 262_144), Int4())) < 0.095
    positive = vector("positive", 262_144)
    assert relative_error(positive, round_trip(positive, Int4())) < 0.075, "no level is wasted on negative values"
    assert Int4().size(262_144) * 8 / 262_144 == 4.25


def test_values_of_both_signs_near_the_largest_fp32() -> None:
    values = fp32(LARGEST, -LARGEST, LARGEST / 2)
    np.testing.assert_allclose(round_trip(values, Int4()), values, atol=LARGEST / 15)
    saturated = Int4().decode(code(step(2.0**125) | 8, 0x0F), 2)
    assert saturated.tolist() == [7 * 2.0**125, -LARGEST], "-8 · 2^125 is more than an fp32 holds"


@pytest.mark.parametrize("head", [0xFFFF, 0xFF00, 0xFF80, 0x0070, 0x0001, step(LARGEST / 7) + 32])
def test_steps_that_no_block_has_are_refused(head: int) -> None:
    with pytest.raises(BadCode, match="step is out of range"):
        Int4().decode(code(head, 0), 1)


def test_values_beside_the_vector_are_refused() -> None:
    with pytest.raises(BadCode, match="a value too many"):
        Int4().decode(code(ONE, 0x10), 1)
    with pytest.raises(BadCode, match="without a step"):
        Int4().decode(code(0, 0x10), 2)


BITS = st.builds(
    lambda length, seed: np.random.default_rng(seed).integers(0, 1 << 32, length, np.uint32).view(np.float32),
    st.integers(1, 300),
    st.integers(0, 99),
).map(lambda values: np.where(np.isfinite(values), values, np.float32(0)))
"""Values of every magnitude."""


@given(VECTORS | BITS, st.sampled_from([INT4_BLOCK, 32, 7, 1]))
@settings(deadline=None)
def test_compiled_loops_have_the_bits_of_numpy(values: Vector, block: int) -> None:
    coder = Int4(block)
    values.flags.writeable = False
    data = coder.encode(values)
    assert data == int4_in_numpy.encode(values, block)
    decoded = int4_in_numpy.decode(data, len(values), block)
    assert coder.decode(data, len(values)).tobytes() == decoded.tobytes()
    assert coder.decode(memoryview(bytearray(data)), len(values)).tobytes() == decoded.tobytes()


@given(st.integers(1, 300), st.integers(0, 999))
@settings(deadline=None)
def test_any_codes_are_decoded_as_by_numpy(length: int, seed: int) -> None:
    """Also those whose values are too large for an fp32, which no encoder of ours writes."""
    dice = np.random.default_rng(seed)
    heads = dice.integers(0x0100, 0xFC00, -(-length // INT4_BLOCK), np.uint16)
    data = heads.tobytes() + dice.integers(0, 256 if length % 2 == 0 else 16, (length + 1) // 2, np.uint8).tobytes()
    decoded = Int4().decode(data, length)
    assert decoded.tobytes() == int4_in_numpy.decode(data, length, INT4_BLOCK).tobytes()
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 69])
def test_what_is_not_finite_is_refused(bad: float, at: int) -> None:
    values = np.ones(70, np.float32)
    values[at] = bad
    with pytest.raises(ValueError, match="not finite"):
        Int4().encode(values)
