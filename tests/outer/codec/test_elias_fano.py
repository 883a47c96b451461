from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.outer.codec import BadCode
from pier_node.outer.codec.topk import Bits, collect, index_bits, read_indices, spread


def bits(text: str) -> Bits:
    return np.array([[int(bit) for bit in text if bit != " "]], np.uint8)


@given(st.integers(1, 4096), st.integers(1, 5), st.integers(0, 999))
def test_round_trip(length: int, rows: int, seed: int) -> None:
    rng, count = np.random.default_rng(seed), -(-length // 64)
    indices = np.sort([rng.choice(length, count, replace=False) for _ in range(rows)])
    code = index_bits(indices)
    assert code.shape == (rows, 8 * count)
    assert (read_indices(code, length) == indices).all()


def test_golden() -> None:
    code = bits("110000 111111  1010")
    assert index_bits(np.array([[3, 127]])).tolist() == code.tolist(), "3 + 64·0 and 63 + 64·1"
    assert read_indices(code, 128).tolist() == [[3, 127]]


def test_extremes() -> None:
    for indices in (np.arange(64)[None], np.arange(4032, 4096)[None]):
        assert (read_indices(index_bits(indices), 4096) == indices).all()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("110000 111111  1000", "more or fewer"),
        ("110000 111111  1110", "more or fewer"),
        ("110000 110000  1100", "order or out of range"),  # 3, 3
        ("111000 110000  1100", "order or out of range"),  # 7, 3
        ("110000 111111  1010", "order or out of range"),  # 127 of 127 values
        ("110000 111111  1001", "order or out of range"),  # 63 + 64·2
    ],
)
def test_refusals(code: str, reason: str) -> None:
    with pytest.raises(BadCode, match=reason):
        read_indices(bits(code), 127)


def test_one_bad_row_is_enough() -> None:
    good, bad = bits("110000 111111  1010"), bits("110000 110000  1100")
    with pytest.raises(BadCode):
        read_indices(np.concatenate([good, good, bad]), 128)


@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_numbers_of_some_bits(width: int, numbers: list[int]) -> None:
    kept = np.array([numbers, numbers[::-1]], np.uint8) // np.uint8(1 << (8 - width))
    found = spread(kept, width)
    assert found.shape == (2, width * len(numbers))
    assert found.max() <= 1
    assert (collect(found, width) == kept).all()
    assert spread(np.full((1, 1), 6, np.uint8), 4).tolist() == [[0, 1, 1, 0]]
