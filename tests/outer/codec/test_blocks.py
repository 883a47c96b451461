from __future__ import annotations

import numpy as np
import pytest
from rounds.cases import fp32

from pier_node.outer.codec.blockwise import block_maximum, in_blocks, to_integers


def test_whole_blocks_are_a_view() -> None:
    values = fp32(*range(6))
    blocks = in_blocks(values, 3)
    assert blocks.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(blocks, values)


def test_the_last_block_is_filled_with_zeros() -> None:
    blocks = in_blocks(np.array([1, 2, 3, 4], np.int8), 3)
    assert blocks.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert blocks.dtype == np.int8


def test_the_largest_of_each_block() -> None:
    blocks = fp32(3, -1, 2, -5, -4, -6).reshape(2, 3)
    assert block_maximum(blocks).tolist() == [[3], [-4]]


def test_to_nearest_even() -> None:
    values = fp32(0.5, 1.5, -2.5, 1.4, -1.6)
    to_integers(values, None)
    assert values.tolist() == [0, 2, -2, 1, -2]


@pytest.mark.parametrize("value", [-3.0, -1.25, 0.0, 0.1, 7.9])
def test_by_chance_to_a_neighbour_with_the_right_mean(value: float) -> None:
    values = np.full(40_000, value, np.float32)
    to_integers(values, np.random.default_rng(1))
    assert set(values) <= {np.floor(value), np.ceil(value)}
    assert values.mean(dtype=np.float64) == pytest.approx(value, abs=4 * 0.5 / 200), "four standard errors"
