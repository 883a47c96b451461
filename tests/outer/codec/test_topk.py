from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from outer.codec.samples import VECTORS, relative_error, vector
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.codec import BadCode, codec, of_means
from pier_node.outer.codec.topk import BLOCK, largest

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
        found = largest(block[None], count)[0]
        order = np.argsort(-block.astype(np.float64), kind="stable")[:count]
        assert found.tolist() == sorted(order), "the first of equal ones"
        decoded = round_trip("topk", values)[start : start + BLOCK]
        assert set(np.flatnonzero(decoded)) <= set(found)
        assert (decoded * np.sign(values[start : start + BLOCK]) >= 0).all()


def test_ties_in_some_rows_only() -> None:
    rows = fp32(5, 1, 4, 3, 2, 2, 2, -2, 1, -3, 3, 3).reshape(3, 4)
    assert largest(rows, 2).tolist() == [[0, 2], [0, 1], [1, 2]]
    assert largest(np.zeros((2, 200), np.float32), 3).tolist() == [[0, 1, 2]] * 2


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
