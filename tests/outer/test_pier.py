from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.pier import accumulate, outer_step, pseudo_gradient


def step(anchor: Vector, momentum: Vector, delta: Vector, mu: float, lr: float) -> tuple[Vector, Vector]:
    anchor_out, momentum_out = np.empty_like(anchor), np.empty_like(momentum)
    outer_step(anchor, momentum, delta, mu, lr, anchor_out, momentum_out)
    return anchor_out, momentum_out


def test_golden_step() -> None:
    anchor, delta = fp32(1, -2), np.empty(2, np.float32)
    pseudo_gradient(anchor, fp32(0.8, -1.7), out=delta)
    np.testing.assert_allclose(delta, [0.2, -0.3], rtol=1e-6)
    after, momentum = step(anchor, fp32(0.1, 0.2), delta, 0.9, 1.1)
    np.testing.assert_allclose(momentum, [0.29, -0.12], rtol=1e-6)
    np.testing.assert_allclose(after, [0.4929, -1.5512], rtol=1e-6)


MULOCO = (
    ((0.5, -1.0, 0.25, 0.125), (0.28, 3.44, -3.36, 0.32), (0.45, -0.9, 0.225, 0.1125)),
    ((-0.25, 0.5, 1.0, 0.0), (0.478, 3.044, -4.881, 0.2795), (0.045, -0.09, 1.035, 0.0675)),
    ((0.125, 0.0625, -0.5, 0.75), (0.2818, 2.9864, -4.5336, -0.8248), (0.1395, 0.00225, 0.171, 0.7155)),
)
"""Pseudo-gradients, then weights and momentum of `MuLoCo1._outer_step`, of github.com/bentherien/muloco-1 at 33cc333,
with outer_momentum 0.6 and outer_lr 0.9. Its momentum is in units of the learning rate."""


def test_steps_are_those_of_muloco() -> None:
    anchor, momentum = fp32(1, 2, -3, 0.5), np.zeros(4, np.float32)
    for delta, weights, buffer in MULOCO:
        anchor, momentum = step(anchor, momentum, fp32(*delta), 0.6, 0.9)
        np.testing.assert_allclose(anchor, weights, atol=1e-4)
        np.testing.assert_allclose(0.9 * momentum, buffer, atol=1e-4)


@pytest.mark.parametrize(("mu", "lr"), [(0.9, 0.7), (0.99, 1.1), (0.5, 0.1)])
def test_equals_nesterov_sgd_over_a_hundred_rounds(mu: float, lr: float) -> None:
    dice = np.random.default_rng(7)
    anchor, momentum = dice.standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    sgd = torch.optim.SGD([theirs], lr=lr, momentum=mu, nesterov=True)
    for _ in range(100):
        delta = (0.01 * dice.standard_normal(64)).astype(np.float32)
        anchor, momentum = step(anchor, momentum, delta, mu, lr)
        theirs.grad = torch.from_numpy(delta)
        sgd.step()
        np.testing.assert_allclose(anchor, theirs.detach().numpy(), rtol=0, atol=2e-5)
    assert np.abs(anchor).max() > 0.1


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8))
def test_one_step_without_momentum_lands_on_the_weights(values: list[float]) -> None:
    anchor, weights = fp32(*values), fp32(*reversed(values))
    delta = np.empty_like(anchor)
    pseudo_gradient(anchor, weights, out=delta)
    after, _ = step(anchor, np.zeros_like(anchor), delta, 0.0, 1.0)
    np.testing.assert_array_equal(after, anchor - (anchor - weights), "identity up to the rounding of the difference")
    np.testing.assert_allclose(after, weights, rtol=1e-6, atol=1e-6 * max(map(abs, values)))


def test_warmup_gathers_the_decayed_sum_of_movements() -> None:
    dice = np.random.default_rng(3)
    marks = [dice.standard_normal(32).astype(np.float32) for _ in range(21)]
    momentum = np.zeros(32, np.float32)
    for before, after in pairwise(marks):
        gathered = np.empty_like(momentum)
        accumulate(momentum, before - after, 0.9, out=gathered)
        momentum = gathered
    moves = [before.astype(np.float64) - after for before, after in pairwise(marks)]
    expected = sum(0.9**age * move for age, move in enumerate(reversed(moves)))
    np.testing.assert_allclose(momentum, expected, atol=1e-5)


def test_inputs_stay_as_they_are() -> None:
    anchor, momentum, delta = fp32(1, 2), fp32(3, 4), fp32(5, 6)
    step(anchor, momentum, delta, 0.9, 0.7)
    assert (anchor.tolist(), momentum.tolist(), delta.tolist()) == ([1, 2], [3, 4], [5, 6])
