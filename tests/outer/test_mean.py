from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.mean import relative_weights, trimmed_mean, weighted_mean

FINITE = st.floats(-1e6, 1e6, width=32)


def mean(vectors: list[Vector], tokens: list[int]) -> Vector:
    out = np.full(len(vectors[0]), np.nan, np.float32)
    weighted_mean(vectors, relative_weights(tokens), out=out)
    return out


def test_golden() -> None:
    np.testing.assert_allclose(mean([fp32(1, -2), fp32(4, 4)], [100, 50]), [2.0, 0.0], rtol=1e-6)


@given(st.integers(1, 8), st.integers(1, 2**52), st.data())
def test_equal_tokens_give_the_plain_mean_to_the_last_bit(count: int, tokens: int, data: st.DataObject) -> None:
    vectors = [data.draw(arrays(np.float32, 5, elements=FINITE)) for _ in range(count)]
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total = total + vector
    assert mean(vectors, [tokens] * count).tobytes() == (total / np.float32(count)).tobytes()


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=6), st.data())
def test_is_the_weighted_mean(tokens: list[int], data: st.DataObject) -> None:
    vectors = [data.draw(arrays(np.float32, 4, elements=FINITE)) for _ in tokens]
    expected = np.average(np.array(vectors, np.float64), axis=0, weights=tokens)
    scale = max(float(np.abs(vector).max()) for vector in vectors)
    np.testing.assert_allclose(mean(vectors, tokens), expected, atol=4e-6 * scale + 1e-30)


def test_nobody_means_zero() -> None:
    out = fp32(1, 2)
    weighted_mean([], [], out=out)
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "weights"), [([], []), ([0, 0], [0, 0]), ([5], [1]), ([3, 0, 3], [1, 0, 1]), ([1, 4], [0.25, 1])]
)
def test_relative_weights(tokens: list[int], weights: list[float]) -> None:
    assert [float(weight) for weight in relative_weights(tokens)] == weights


def test_whoever_has_a_token_has_a_weight() -> None:
    assert relative_weights([1, 2**53 - 1])[0] > 0


# --- trimmed -----------------------------------------------------------------------------------


def trimmed(values: list[float], tokens: list[int]) -> float:
    out = fp32(np.nan)
    trimmed_mean([fp32(value) for value in values], relative_weights(tokens), out)
    return float(out[0])


@pytest.mark.parametrize(
    ("values", "tokens", "mean"),
    [
        ([1, 2, 30], [5, 5, 5], 2),
        ([30, 1, 2, 4], [5, 5, 5, 5], 3),
        ([-1e6, 1, 2, 3, 1e6], [1] * 5, 2),
        ([1, 2, 30], [1, 1, 4], 30),
        ([1, 2, 1e6], [99, 99, 2], 1.515),
        ([1, 3], [7, 7], 2),
        ([1, 3], [99, 1], 1),
        ([4], [7], 4),
    ],
)
def test_the_middle_third(values: list[float], tokens: list[int], mean: float) -> None:
    assert trimmed(values, tokens) == pytest.approx(mean, rel=1e-5)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 100)), min_size=1, max_size=9))
def test_is_the_mean_of_the_middle_third_of_single_tokens(sites: list[tuple[float, int]]) -> None:
    ranked = sorted(value for value, tokens in sites for _ in range(3 * tokens))
    third = len(ranked) // 3
    values, tokens = zip(*sites, strict=True)
    assert trimmed(list(values), list(tokens)) == pytest.approx(np.mean(ranked[third:-third]), rel=1e-3, abs=0.1)


@given(st.integers(2, 7), st.floats(-1e30, 1e30), st.integers(0, 2**32))
def test_less_than_a_third_of_the_tokens_cannot_leave_the_range_of_the_others(
    count: int, evil: float, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    honest = dice.standard_normal(count).tolist()
    tokens = dice.integers(1, 50, count).tolist()
    result = trimmed([*honest, evil], [*tokens, max(1, sum(tokens) // 2 - 1)])
    assert min(honest) - 1e-4 <= result <= max(honest) + 1e-4


def test_nobody_trimmed_means_zero() -> None:
    out = fp32(1, 2)
    trimmed_mean([], [], out)
    assert out.tolist() == [0, 0]
