"""What holds for every codec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outer.codec.samples import KINDS, VECTORS, vector

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector
from pier_node.outer.codec import CODECS, BadCode, Codec, codec

every_codec = pytest.mark.parametrize("coder", CODECS.values(), ids=CODECS)
every_lossy_codec = pytest.mark.parametrize(
    "coder", [each for each in CODECS.values() if each.lossy], ids=lambda coder: coder.name
)
NAMES = ["none", "bf16", "int8", "int4", "topk", "topk2"]


def test_names() -> None:
    assert list(CODECS) == NAMES
    assert [codec(name).name for name in NAMES] == NAMES
    assert [name for name in NAMES if not codec(name).lossy] == ["none"]
    with pytest.raises(PierError, match="no codec 'zip'"):
        codec("zip")


@every_codec
@given(values=VECTORS)
@settings(max_examples=80, deadline=None)
def test_round_trip_keeps_length_and_finiteness_and_loses_no_more_than_there_is(coder: Codec, values: Vector) -> None:
    data = coder.encode(values)
    decoded = coder.decode(data, len(values))
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    assert np.isfinite(decoded).all()
    exact = values.astype(np.float64)
    assert np.linalg.norm(exact - decoded) <= np.linalg.norm(exact) * (1 + 1e-6), "error feedback needs a contraction"
    assert len(data) == coder.size(len(values)) <= 4 * len(values) + 2
    assert data == coder.encode(values.copy()), "deterministic"


@every_codec
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 4097])
def test_every_prefix_and_every_longer_code_is_refused(coder: Codec, length: int) -> None:
    data = bytes(coder.encode(vector("normal", length)))
    for end in {*range(min(len(data), 200)), *range(max(len(data) - 200, 0), len(data))}:
        with pytest.raises(BadCode):
            coder.decode(data[:end], length)
    for more in (b"\0", b"\xff", data):
        with pytest.raises(BadCode):
            coder.decode(data + more, length)


@every_codec
@pytest.mark.parametrize("length", [-1, 0])
def test_no_values_have_no_code(coder: Codec, length: int) -> None:
    with pytest.raises(BadCode):
        coder.decode(b"", length)


@every_lossy_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4096, 4999])
def test_what_is_not_finite_is_refused(coder: Codec, bad: float, place: int) -> None:
    values = vector("normal", 5000)
    values[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        coder.encode(values)
    with pytest.raises(ValueError, match="no values"):
        coder.encode(values[:0])


@every_lossy_codec
@given(length=st.integers(1, 200), data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_finite(coder: Codec, length: int, data: st.DataObject) -> None:
    size = coder.size(length)
    code = data.draw(st.binary(min_size=size, max_size=size))
    try:
        decoded = coder.decode(code, length)
    except BadCode:
        return
    assert decoded.shape == (length,)
    assert np.isfinite(decoded).all()


@every_lossy_codec
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_code_with_a_flipped_bit_is_refused_or_finite(coder: Codec, kind: str) -> None:
    values = vector(kind, 4100)
    code = bytearray(coder.encode(values))
    for bit in np.random.default_rng(2).integers(0, 8 * len(code), 200):
        code[bit // 8] ^= 1 << bit % 8
        try:
            assert np.isfinite(coder.decode(bytes(code), len(values))).all()
        except BadCode:
            pass
        finally:
            code[bit // 8] ^= 1 << bit % 8


@every_lossy_codec
@pytest.mark.parametrize("kind", ["constant", "normal", "heavy-tailed"])
def test_with_error_feedback_the_mean_of_what_is_sent_converges_to_the_vector(coder: Codec, kind: str) -> None:
    values, rounds = vector(kind, 300), 1200
    residual, total = np.zeros_like(values), np.zeros(len(values))
    for _ in range(rounds):
        update = values + residual
        decoded = coder.decode(coder.encode(update), len(values))
        residual = update - decoded
        total += decoded
    assert np.linalg.norm(total / rounds - values) < 0.06 * np.linalg.norm(values)
    np.testing.assert_allclose(total + residual, rounds * values.astype(np.float64), rtol=1e-3, atol=1e-3)


@every_lossy_codec
def test_all_sizes_up_to_a_chunk(coder: Codec) -> None:
    for length in (262_144, 262_143, 258_049):
        values = vector("normal", length)
        data = coder.encode(values)
        assert len(data) == coder.size(length)
        assert coder.decode(data, length).shape == (length,)
