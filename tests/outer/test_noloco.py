"""NoLoCo's step: golden values, special cases, the mean, Monte Carlo (arXiv 2506.10911; docs/noloco.md, "The step")."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from outer.replicas import Replicas, mean_of, stay
from outer.stability import gamma_limit, recursion, stationary_spread
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.config.run import NolocoSection
from pier_node.outer.noloco import PIECE, needs_anchors, noloco_step

PHI = [fp32(1, -2, 0.5), fp32(3, 0, -1.5)]
THETA = [fp32(0.6, -1, 0.25), fp32(2.4, -0.5, -0.75)]
DELTA = [fp32(0.2, -0.4, 0.1), fp32(-0.3, 0.6, -0.2)]
GOSSIP = NolocoSection(alpha=0.0, beta=1.0, gamma=1.0)

GOLDEN: dict[str, tuple[NolocoSection, bool, list[Vector], list[Vector]]] = {
    "gamma is beta": (
        NolocoSection(),
        True,
        [fp32(0.45, 0.675, -0.475), fp32(-1.2, -0.225, 0.775)],
        [fp32(1.45, -1.325, 0.025), fp32(1.8, -0.225, -0.725)],
    ),
    "gamma is 0.3": (
        NolocoSection(gamma=0.3),
        True,
        [fp32(0.05, 0.275, -0.075), fp32(-0.8, 0.175, 0.375)],
        [fp32(1.05, -1.725, 0.425), fp32(2.2, 0.175, -1.125)],
    ),
    "singletons": (
        NolocoSection(gamma=0.3),
        False,
        [fp32(-0.18, 0.5, -0.125), fp32(-0.57, -0.05, 0.425)],
        [fp32(0.82, -1.5, 0.375), fp32(2.43, -0.05, -1.075)],
    ),
}
"""Of each: rates, whether the two meet, δ' and φ'."""


def step(
    phi: Vector, delta: Vector, theta: Vector, mean_anchor: Vector | None, rates: NolocoSection
) -> tuple[Vector, Vector]:
    """φ', δ'."""
    anchor, momentum = np.full_like(phi, np.nan), np.full_like(phi, np.nan)
    noloco_step(phi, delta, theta, mean_anchor, rates, anchor_out=anchor, momentum_out=momentum)
    return anchor, momentum


def met(rates: NolocoSection, pair: bool, both: bool = False) -> list[tuple[Vector, Vector]]:
    """φ', δ' of the two of section 6.1; `both`: from two means though one would do."""
    theta, phi = mean_of(THETA), mean_of(PHI) if both or needs_anchors(rates) else None
    return [step(PHI[one], DELTA[one], theta if pair else THETA[one], phi if pair else None, rates) for one in range(2)]


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_steps(case: str) -> None:
    rates, pair, momenta, anchors = GOLDEN[case]
    for one, (anchor, momentum) in enumerate(met(rates, pair)):
        np.testing.assert_allclose(momentum, momenta[one], rtol=0, atol=2e-7)
        np.testing.assert_allclose(anchor, anchors[one], rtol=0, atol=2e-7)
    mean = mean_of([anchor for anchor, _ in met(rates, pair)])
    np.testing.assert_allclose(mean, [1.625, -0.775, -0.35], rtol=0, atol=2e-7)


def test_the_sign_is_not_the_printed_one() -> None:
    """The paper's Eq. 2 with its own Eq. 1: what an implementation by the letter gives (section 7.1)."""
    wrong = [fp32(1.15, 0.325, -0.825), fp32(-0.5, -0.575, 0.425)]
    for one, (_, momentum) in enumerate(met(NolocoSection(), pair=True)):
        assert np.abs(momentum - wrong[one]).max() > 0.3


def test_without_momentum_and_with_full_rates_a_pair_ends_at_its_mean() -> None:
    for anchor, _ in met(GOSSIP, pair=True):
        np.testing.assert_allclose(anchor, [1.5, -0.75, -0.25], rtol=0, atol=2e-7)


def test_weights_alone_give_what_both_tensors_do_when_gamma_is_beta() -> None:
    assert not needs_anchors(NolocoSection())
    for one, two in zip(met(NolocoSection(), True), met(NolocoSection(), True, both=True), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=3e-7)


@pytest.mark.parametrize("length", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_pieces_change_nothing(length: int) -> None:
    dice = np.random.default_rng(length)
    phi, delta, theta, mean = dice.standard_normal((4, length)).astype(np.float32)
    rates = NolocoSection(gamma=0.3)
    anchor, momentum = step(phi, delta, theta, mean, rates)
    expected = 0.5 * delta.astype(float) + 0.7 * (theta.astype(float) - mean) + 0.3 * (mean.astype(float) - phi)
    np.testing.assert_allclose(momentum, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(anchor, phi + momentum)


# --- all in one group: DiLoCo with heavy ball -----------------------------------------------------


def torch_sgd(phi: Vector, targets: list[Vector], nesterov: bool) -> Vector:
    weights = torch.nn.Parameter(torch.from_numpy(phi.copy()))
    optimizer = torch.optim.SGD([weights], lr=0.7, momentum=0.5, nesterov=nesterov)
    for target in targets:
        weights.grad = (weights.detach() - torch.from_numpy(target)).clone()
        optimizer.step()
    return weights.detach().numpy()


def test_one_group_of_all_is_heavy_ball_sgd_on_the_mean() -> None:
    dice = np.random.default_rng(7)
    phi = dice.standard_normal(50).astype(np.float32)
    targets = list(dice.standard_normal((20, 50)).astype(np.float32))
    replicas = Replicas(np.tile(phi, (4, 1)), NolocoSection(), size=4)
    for target in targets:
        replicas.meet(np.tile(target, (4, 1)))
    assert replicas.spread() < 1e-30
    np.testing.assert_allclose(replicas.anchors[0], torch_sgd(phi, targets, nesterov=False), rtol=0, atol=1e-6)
    assert np.abs(replicas.anchors[0] - torch_sgd(phi, targets, nesterov=True)).max() > 0.1


# --- the mean over replicas -------------------------------------------------------------------------

VALUES = st.floats(-10, 10, width=32)
RATES = st.builds(
    NolocoSection, alpha=st.floats(0, 0.5, width=32), beta=st.floats(0, 2, width=32), gamma=st.floats(0, 1, width=32)
)


@given(st.data(), RATES, st.integers(1, 7), st.integers(1, 4), st.integers(0, 99))
def test_the_mean_does_not_depend_on_who_met_whom(
    data: Any, rates: NolocoSection, count: int, size: int, seed: int
) -> None:
    """Property 3: mean δ ← α·mean δ − β·mean Δ for any partition, singletons and unequal groups included."""
    phi, delta, theta = data.draw(arrays(np.float32, (3, count, 5), elements=VALUES))
    replicas = Replicas(phi, rates, size=size, seed=seed)
    replicas.momenta = delta
    replicas.meet(theta)
    pseudo = (phi.astype(float) - theta).mean(axis=0)
    expected = rates.alpha * delta.mean(axis=0, dtype=float) - rates.beta * pseudo
    np.testing.assert_allclose(replicas.momenta.mean(axis=0, dtype=float), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        replicas.anchors.mean(axis=0, dtype=float), phi.mean(axis=0, dtype=float) + expected, rtol=0, atol=1e-4
    )


def test_a_pair_that_is_applied_on_one_side_only_moves_the_mean() -> None:
    phi = np.array([[1.0, -2.0], [3.0, 0.0]], np.float32)
    mean = phi.mean(axis=0)
    whole = Replicas(phi, NolocoSection())
    whole.meet(phi)
    np.testing.assert_allclose(whole.anchors.mean(axis=0), mean, rtol=0, atol=3e-7)
    half = np.stack([whole.anchors[0], phi[1]])
    assert np.abs(half.mean(axis=0) - mean).min() > 0.3


# --- Monte Carlo with fixed seeds ------------------------------------------------------------------


def spread_out(count: int, coordinates: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal((count, coordinates)).astype(np.float32)


@pytest.mark.parametrize(
    ("rates", "size"),
    [(NolocoSection(), 2), (NolocoSection(), 4), (NolocoSection(), 8), (NolocoSection(gamma=0.3), 2), (GOSSIP, 2)],
)
def test_replicas_come_together_as_predicted(rates: NolocoSection, size: int) -> None:
    """Property 4, N = 16: the mean spread of 300 runs after each of 6 rounds is that of the recursion within 4 %."""
    starts = [spread_out(16, 8, seed) for seed in range(300)]
    runs = [Replicas(start, rates, size=size, seed=seed).run(6, stay) for seed, start in enumerate(starts)]
    matrix = np.array(recursion(rates.alpha, rates.gamma, size, 16))
    begin = np.mean([start.var(axis=0).mean() for start in starts])
    expected = [begin * np.linalg.matrix_power(matrix, rounds)[0, 0] for rounds in range(1, 7)]
    np.testing.assert_allclose(np.mean(runs, axis=0), expected, rtol=0.04)


def test_above_the_limit_replicas_drift_apart() -> None:
    limit = gamma_limit(0.5, 2, 16)
    rates = [NolocoSection.model_construct(alpha=0.5, beta=0.7, gamma=limit * part) for part in (0.9, 1.1)]
    below, above = (
        np.mean([Replicas(spread_out(16, 8, seed), rate, seed=seed).run(60, stay)[-1] for seed in range(30)])
        for rate in rates
    )
    assert below < 0.1
    assert above > 10


@pytest.mark.parametrize(
    ("rates", "count", "size"),
    [
        (NolocoSection(), 16, 2),
        (NolocoSection(), 4, 2),
        (NolocoSection(), 16, 4),
        (NolocoSection(), 16, 8),
        (NolocoSection(gamma=1.0), 16, 2),
        (GOSSIP, 16, 2),
        (NolocoSection(alpha=0.3), 8, 2),
    ],
)
def test_noise_leaves_the_predicted_spread(rates: NolocoSection, count: int, size: int) -> None:
    """Property 5: iid noise of unit variance in Δ; the mean over 1500 rounds and 200 coordinates; 3 %."""
    dice = np.random.default_rng(11)

    def train(anchors: Vector) -> Vector:
        return anchors + dice.standard_normal(anchors.shape, dtype=np.float32)

    replicas = Replicas(np.zeros((count, 200), np.float32), rates, size=size)
    spreads = replicas.run(1500, train)[100:]
    # `spread` divides by N, X∞ is the variance of a deviation from the mean, which does so too.
    expected = stationary_spread(rates.alpha, rates.beta, rates.gamma, size, count)
    assert np.mean(spreads) == pytest.approx(expected, rel=0.03)


def test_on_a_quadratic_the_spread_follows_the_inner_rate() -> None:
    """Property 6: A = 1, unit noise, H = 10, N = 16; spread/ω² = 8.27 at ω = 8e-3 and 9.83 at 2e-3 within 5 %."""
    for rate, expected in ((8e-3, 8.27), (2e-3, 9.83)):
        dice = np.random.default_rng(5)

        def train(anchors: Vector, rate: float = rate, dice: np.random.Generator = dice) -> Vector:
            weights = anchors.copy()
            for _ in range(10):
                weights -= np.float32(rate) * (weights + dice.standard_normal(weights.shape, dtype=np.float32))
            return weights

        replicas = Replicas(np.zeros((16, 100), np.float32), NolocoSection())
        spreads, variances = [], []
        for number in range(int(12 / rate)):
            replicas.meet(train(replicas.anchors))
            if number > 2 / rate:
                spreads.append(replicas.spread())
                variances.append(float((replicas.anchors.mean(axis=0, dtype=float) ** 2).mean()))
        assert np.mean(spreads) / rate**2 == pytest.approx(expected, rel=0.05)
        assert np.mean(variances) / rate == pytest.approx(0.043, rel=0.15)


def test_the_wrong_sign_overflows_on_a_quadratic() -> None:
    """Property 6: at ω = 0.01, H = 50, |φ| grows from 2 to above 1e12 by round 78."""
    phi, delta, kept = 2.0, 0.0, (1 - 0.01) ** 50
    for _ in range(78):
        pseudo = phi - kept * phi
        delta = 0.5 * delta + 0.7 * pseudo  # −β·(θ − φ): the letter of the paper
        phi += delta
    assert abs(phi) > 1e12
    replicas = Replicas(np.ones((2, 3), np.float32), NolocoSection())
    replicas.run(78, lambda anchors: anchors * np.float32(kept))
    assert np.abs(replicas.anchors).max() < 1e-3
