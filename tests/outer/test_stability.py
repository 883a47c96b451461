from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outer.stability import contraction, gamma_limit, mixing, stationary_spread

from pier_node.config.run import NolocoSection


@given(st.floats(0.0, 0.95))
def test_the_configuration_takes_what_is_below_the_limit_of_pairs(alpha: float) -> None:
    limit = gamma_limit(alpha)
    NolocoSection(alpha=alpha, gamma=0.999 * limit)
    with pytest.raises(ValueError, match="drift apart"):
        NolocoSection(alpha=alpha, gamma=1.001 * limit)


@pytest.mark.parametrize(
    ("alpha", "size", "sites", "limit"),
    [
        (0.5, 2, math.inf, 1.5),
        (0.5, 2, 16, 1.552),
        (0.5, 4, 16, 2.143),
        (0.5, 8, 16, 2.647),
        (0.5, 16, 16, 3.0),
        (0.7, 2, math.inf, 1.02),
        (0.9, 2, math.inf, 0.38),
    ],
)
def test_limits(alpha: float, size: int, sites: float, limit: float) -> None:
    assert gamma_limit(alpha, size, sites) == pytest.approx(limit, abs=5e-4)


@pytest.mark.parametrize(
    ("alpha", "gamma", "size", "sites", "factor"),
    [
        (0.0, 1.0, 2, math.inf, 0.5),
        (0.0, 1.0, 2, 16, 14 / 30),
        (0.5, 0.7, 2, math.inf, 0.700),
        (0.5, 0.7, 2, 16, 0.685),
        (0.5, 0.7, 2, 4, 0.628),
        (0.5, 0.7, 2, 2, 0.5),
        (0.5, 0.7, 4, 16, 0.575),
        (0.5, 0.7, 8, 16, 0.524),
        (0.5, 0.1, 2, math.inf, 0.801),
        (0.5, 0.3, 2, math.inf, 0.625),
        (0.5, 0.5, 2, math.inf, 0.652),
        (0.5, 1.0, 2, math.inf, 0.792),
        (0.5, 1.49, 2, math.inf, 0.995),
        (0.5, 1.6, 2, math.inf, 1.052),
        (0.9, 0.3, 2, math.inf, 0.978),
        (0.9, 0.7, 2, math.inf, 1.0985),
        (0.9, 0.95, 2, math.inf, 1.187),
    ],
)
def test_contraction(alpha: float, gamma: float, size: int, sites: float, factor: float) -> None:
    assert contraction(alpha, gamma, size, sites) == pytest.approx(factor, abs=6e-4)


def test_the_best_pull_at_the_default_momentum_is_near_0_3() -> None:
    factors = {gamma: contraction(0.5, gamma) for gamma in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)}
    assert min(factors, key=lambda gamma: factors[gamma]) == 0.3


@given(st.floats(0.0, 0.95), st.integers(2, 8), st.sampled_from([8, 16, 64, math.inf]))
def test_the_limit_is_where_the_recursion_stops_contracting(alpha: float, size: int, sites: float) -> None:
    limit = gamma_limit(alpha, size, sites)
    assert contraction(alpha, 0.99 * limit, size, sites) < 1 < contraction(alpha, 1.01 * limit, size, sites)


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "size", "sites", "spread"),
    [
        (0.5, 0.7, 0.7, 2, 16, 1.046),
        (0.5, 0.7, 0.7, 2, 4, 0.4295),
        (0.5, 0.7, 0.7, 2, 1024, 1.308),
        (0.5, 0.7, 0.7, 4, 16, 0.2437),
        (0.5, 0.7, 0.7, 8, 16, 0.0637),
        (0.5, 0.7, 1.0, 2, 16, 1.1305),
        (0.0, 1.0, 1.0, 2, 16, 0.8203),
        (0.3, 0.7, 0.7, 2, 8, 0.519),
        (0.5, 0.7, 0.3, 2, 64, 1.943),
    ],
)
def test_spread(alpha: float, beta: float, gamma: float, size: int, sites: float, spread: float) -> None:
    assert stationary_spread(alpha, beta, gamma, size, sites) == pytest.approx(spread, abs=6e-4)


@given(st.floats(0.0, 0.9), st.floats(0.01, 0.99), st.integers(2, 6), st.sampled_from([6, 16, 1024]))
def test_the_spread_is_the_fixed_point_of_the_recursion_with_noise(
    alpha: float, part: float, size: int, sites: int
) -> None:
    """Iterate X, C, Y with the noise of the group's mean, β²(1/n − 1/N)s², added to Y'."""
    gamma, q = part * gamma_limit(alpha, size, sites), mixing(size, sites)
    noise = 0.7**2 * (1 / size - 1 / sites)
    x = c = y = 0.0
    for _ in range(20_000):
        y = alpha**2 * y - 2 * alpha * gamma * q * c + gamma**2 * q * x + noise
        x, c = x + 2 * (alpha * c - gamma * q * x) + y, alpha * c - gamma * q * x + y
    # φ̃' = φ̃ + δ̃': the C of the right-hand side is the old one
    assert x == pytest.approx(stationary_spread(alpha, 0.7, gamma, size, sites), rel=1e-3)


def test_all_in_one_group_have_no_spread() -> None:
    assert mixing(16, 16) == 1.0
    assert stationary_spread(0.5, 0.7, 0.7, 16, 16) == 0.0
