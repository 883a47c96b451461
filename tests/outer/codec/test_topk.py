from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outer.codec.samples import LARGEST, VECTORS, relative_error, vector
from outer.codec.topk_in_numpy import NumpyTopK
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.codec import BadCode, codec, of_means
from pier_node.outer.codec.topk import BLOCK, TopK

topks = pytest.mark.parametrize("name", ["topk", "topk2"])


def round_trip(name: str, values: Vector) -> Vector:
    return codec(name).decode(codec(name).encode(values), len(values))


def test_compression_of_a_chunk() -> None:
    assert 4 * 262_144 / codec("topk").size(262_144) == 163.84
    assert 4 * 262_144 / codec("topk2").size(262_144) == pytest.approx(195.05, abs=0.01)
    assert [codec("topk").size(length) for length in (1, 64, 65, 4095, 4096, 4097)] == [6, 6, 7, 100, 100, 106]


def test_golden() -> None:
    values = np.zeros(128, np.float32)
    values[[3, 127]] = 1, -8
    data = codec("topk").encode(values)
    # 1 + 7·1, in bf16; indices 110000 111111 1010; then sign and code of each: 0 000 and 1 111
    assert data == bytes.fromhex("803f 803f") + bytes([0b11000011, 0b01011111, 0b11110000])
    assert codec("topk").decode(data, 128).tobytes() == values.tobytes()


@given(VECTORS)
@settings(deadline=None)
def test_the_largest_of_each_block_are_kept_with_their_signs(values: Vector) -> None:
    magnitudes = np.abs(values)
    for start in range(0, len(values), BLOCK):
        block = magnitudes[start : start + BLOCK]
        count = -(-len(block) // 64)
        found = np.argsort(-block.astype(np.float64), kind="stable")[:count]  # the first of equal ones
        decoded = round_trip("topk", values)[start : start + BLOCK]
        assert set(np.flatnonzero(decoded)) <= set(found)
        assert (decoded * np.sign(values[start : start + BLOCK]) >= 0).all()


def test_of_equals_the_first_are_kept() -> None:
    values = np.zeros(2 * 64, np.float32)
    values[[5, 17, 70, 99]] = 2, -2, 2, 3
    assert np.flatnonzero(round_trip("topk", values)).tolist() == [5, 99]


@given(VECTORS, st.sampled_from([("topk", 4), ("topk2", 2)]), st.sampled_from([16, 64, 256]))
@settings(deadline=None)
def test_compiled_loops_have_the_bits_of_numpy(values: Vector, codec: tuple[str, int], density: int) -> None:
    coder, numpy = TopK(*codec, density), NumpyTopK(*codec, density)
    values.flags.writeable = False
    data = coder.encode(values)
    assert data == numpy.encode(values)
    decoded = numpy.decode(data, len(values))
    assert coder.decode(data, len(values)).tobytes() == decoded.tobytes()
    assert coder.decode(memoryview(bytearray(data)), len(values)).tobytes() == decoded.tobytes()


@given(st.integers(1, 9000), st.integers(0, 9999), st.sampled_from([16, 64, 256]))
@settings(deadline=None)
def test_whatever_arrives_is_decoded_or_refused_as_by_numpy(length: int, seed: int, density: int) -> None:
    coder, numpy, dice = TopK("topk", 4, density), NumpyTopK("topk", 4, density), np.random.default_rng(seed)
    data = bytearray(coder.encode(dice.standard_normal(length).astype(np.float32)))
    for at in dice.integers(0, 8 * len(data), dice.integers(1, 4)):
        data[at // 8] ^= 1 << at % 8
    try:
        expected = numpy.decode(bytes(data), length)
    except BadCode:
        with pytest.raises(BadCode):
            coder.decode(bytes(data), length)
    else:
        assert coder.decode(bytes(data), length).tobytes() == expected.tobytes()


# --- indices and levels --------------------------------------------------------------------

LEVELS = bytes.fromhex("803f 803f")
"""1, 2, 3, ..."""


def code(indices: str, line: bytes = LEVELS) -> bytes:
    """Of two values, after their lowest level: sign and code are 0 000 and 1 111."""
    bits = [int(bit) for bit in indices.replace(" ", "")]
    return line + np.packbits(bits, bitorder="little").tobytes() + bytes([0b11110000])


def test_indices_of_six_bits_and_in_unary() -> None:
    values = np.zeros(128, np.float32)
    values[[3, 127]] = 1, -8
    data = code("110000 111111  1010")
    assert codec("topk").decode(data, 128).tobytes() == values.tobytes(), "3 + 64·0 and 63 + 64·1"


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        ("110000 111111  1000", "more or fewer"),
        ("110000 111111  1110", "more or fewer"),
        ("110000 110000  1100", "order or out of range"),  # 3, 3
        ("111000 110000  1100", "order or out of range"),  # 7, 3
        ("110000 111111  1010", "order or out of range"),  # 127 of 127 values
        ("110000 111111  1001", "order or out of range"),  # 63 + 64·2
    ],
)
def test_indices_that_are_refused(indices: str, reason: str) -> None:
    with pytest.raises(BadCode, match=reason):
        codec("topk").decode(code(indices), 127)


@pytest.mark.parametrize("bad", [0x7F80, 0x7FFF, 0x8000, 0xBF80, 0x0001, 0x007F])
def test_levels_that_are_refused(bad: int) -> None:
    for pair in ([bad, 0x3F80], [0x3F80, bad]):
        with pytest.raises(BadCode, match="level"):
            codec("topk").decode(code("110000 111111  1010", np.array(pair, "<u2").tobytes()), 128)


def test_levels_beyond_the_largest_fp32_are_cut_off() -> None:
    decoded = codec("topk").decode(code("110000 111111  1010", bytes.fromhex("7f7f 7f7f")), 128)
    assert decoded[[3, 127]].tolist() == [float.fromhex("0x1.fep127"), -LARGEST]


def kept(*values: float) -> Vector:
    """A vector of which these values are kept, after what is made of them by two bits each."""
    vector = np.zeros(16 * len(values), np.float32)
    vector[::16] = values
    decoded: Vector = TopK("topk2", 2, 16).decode(TopK("topk2", 2, 16).encode(vector), len(vector))[::16]
    return decoded


def test_two_levels_are_the_means_of_two_groups() -> None:
    assert kept(1, 2, 3, 10, 12, -14).tolist() == [2, 2, 2, 12, 12, -12]


def test_magnitudes_on_a_line_are_exact() -> None:
    values = np.zeros(6 * 64, np.float32)
    values[::64] = 5, 5.5, -6, 8.5, 7, 5
    assert round_trip("topk", values).tolist() == values.tolist()


@given(st.integers(0, 999), st.floats(-44, 38))
def test_levels_are_finite_and_no_denormals_at_every_size(seed: int, exponent: float) -> None:
    magnitudes = np.minimum(np.random.default_rng(seed).exponential(size=9) * 10**exponent, LARGEST)
    decoded = np.abs(kept(*magnitudes))
    assert np.isfinite(decoded).all()
    assert not ((decoded > 0) & (decoded < 2.0**-126)).any()


@topks
def test_what_is_sparse_enough_is_kept_whole(name: str) -> None:
    values = np.zeros(3 * BLOCK + 100, np.float32)
    values[[0, 77, 5000, 12_300, 12_387]] = 3, -3, 1e-9, -7e20, 7e20
    np.testing.assert_allclose(round_trip(name, values), values, rtol=2**-8)


@pytest.mark.parametrize(("name", "most"), [("topk", 0.02), ("topk2", 0.065)])
def test_error_of_the_kept_values(name: str, most: float) -> None:
    values = vector("normal", 64 * BLOCK)
    decoded = round_trip(name, values)
    kept = decoded != 0
    assert np.count_nonzero(kept) == 64 * 64
    assert relative_error(values[kept], decoded[kept]) < most


@topks
def test_refusals(name: str) -> None:
    good = codec(name).encode(vector("normal", BLOCK + 65))
    last = codec(name).size(BLOCK)
    for place, byte, reason in [
        (1, 0xFF, "level"),
        (last + 3, 0xFF, "level"),
        (52, good[52] ^ 1, "more or fewer"),  # upper bits of the indices begin here
        (last + 5, good[last + 5] ^ 0x80, "more or fewer"),
    ]:
        code = bytearray(good)
        code[place] = byte
        with pytest.raises(BadCode, match=reason):
            codec(name).decode(bytes(code), BLOCK + 65)


def test_bits_behind_the_last_value_are_refused() -> None:
    data = bytearray(codec("topk").encode(fp32(1)))
    data[-1] |= 0x80
    with pytest.raises(BadCode, match="bits too many"):
        codec("topk").decode(bytes(data), 1)


@topks
@pytest.mark.parametrize("density", [16, 32, 128, 256])
@pytest.mark.parametrize("length", [1, 255, 257, 4096, 9000])
def test_other_densities(name: str, density: int, length: int) -> None:
    coder, values = codec(name, density), vector("normal", length)
    code = coder.encode(values)
    decoded = coder.decode(code, length)
    assert len(code) == coder.size(length)
    parts = [slice(start, start + BLOCK) for start in range(0, length, BLOCK)]
    for part in parts:
        count = -(-len(values[part]) // density)
        assert set(np.nonzero(decoded[part])[0]) <= set(np.argsort(-np.abs(values[part]), kind="stable")[:count])
    with pytest.raises(BadCode):
        codec(name, 64).decode(code, length) if length > 256 else coder.decode(bytes(code) + b"\0", length)


def test_more_than_500_times_less() -> None:
    assert 4 * 262_144 / codec("topk2", 256).size(262_144) == pytest.approx(585.1, abs=0.1)
    assert codec("topk", 64) is codec("topk")


def test_a_mean_of_sparse_codes_is_those_codes_or_int8() -> None:
    assert [of_means(codec("topk"), members, 4096) for members in (1, 4, 40)] == [None] * 3
    assert of_means(codec("topk"), 42, 4096) is codec("int8")
    assert of_means(codec("topk"), 0, 4096) is codec("topk"), "nobody has an update, and the mean is zero"
    assert of_means(codec("int4"), 4, 4096) is codec("int4")
