from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outer.codec.samples import LARGEST
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.codec import BadCode
from pier_node.outer.codec.topk import fit, levels


def decoded(magnitudes: Vector, top: int) -> Vector:
    halves, codes = fit(magnitudes, top)
    return np.take_along_axis(levels(halves, top), codes.astype(np.intp), axis=1)


def squares(magnitudes: Vector, others: Vector) -> float:
    return float(((magnitudes.astype(np.float64) - others) ** 2).sum())


def test_magnitudes_on_a_line_are_exact() -> None:
    magnitudes = fp32(5, 5.5, 6, 8.5, 7, 5).reshape(1, -1)
    halves, codes = fit(magnitudes, 7)
    assert codes.tolist() == [[0, 1, 2, 7, 4, 0]]
    assert levels(halves, 7).tolist() == [[5, 5.5, 6, 6.5, 7, 7.5, 8, 8.5]]


def test_each_row_has_its_line() -> None:
    magnitudes = fp32(1, 3, 1, 1e30, 1e30, 1e30, 0, 0, 0).reshape(3, 3)
    np.testing.assert_allclose(decoded(magnitudes, 1), magnitudes, rtol=2**-8)


def test_two_levels_are_the_means_of_two_groups() -> None:
    found = decoded(fp32(1, 2, 3, 10, 12, 14).reshape(1, -1), 1)
    assert found.tolist() == [[2, 2, 2, 12, 12, 12]]


@given(st.integers(0, 999), st.sampled_from([1, 7]))
def test_is_never_worse_than_levels_from_the_least_to_the_largest(seed: int, top: int) -> None:
    magnitudes = 1 + np.random.default_rng(seed).exponential(size=(1, 64)).astype(np.float32)
    low, step = magnitudes.min(), (magnitudes.max() - magnitudes.min()) / top
    even = low + step * np.rint((magnitudes - low) / step)
    assert squares(magnitudes, decoded(magnitudes, top)) <= squares(magnitudes, even) * 1.01 + 64 * (0.01 * low) ** 2


@given(st.integers(0, 999), st.sampled_from([1, 7]), st.floats(-44, 38))
def test_levels_rise_and_are_finite_at_every_size(seed: int, top: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    magnitudes = np.minimum(rng.exponential(size=(2, 9)) * 10**exponent, LARGEST).astype(np.float32)
    found = levels(fit(magnitudes, top)[0], top)
    assert np.isfinite(found).all()
    assert (np.diff(found, axis=1) >= 0).all()
    assert (found >= 0).all()
    assert not ((found > 0) & (found < 2.0**-126)).any(), "no denormals"


@pytest.mark.parametrize("bad", [0x7F80, 0x7FFF, 0x8000, 0xBF80, 0x0001, 0x007F])
def test_refusals(bad: int) -> None:
    for pair in ([bad, 0x3F80], [0x3F80, bad]):
        with pytest.raises(BadCode, match="level"):
            levels(np.array([pair], np.uint16), 7)


def test_levels_beyond_the_largest_fp32_are_cut_off() -> None:
    assert levels(np.array([[0x7F7F, 0x7F7F]], np.uint16), 1).tolist() == [[float.fromhex("0x1.fep127"), LARGEST]]
