"""Whatever the gradients were, AdamW's moments are within the bounds; and what no gradients lead to is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pier_node.config.run import InnerSection
from pier_node.outer.adamw import take_step
from pier_node.outer.moment_bounds import implausible

LENGTH = 40


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.95, 0.99), (0.99, 0.9)]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(1, 400),
    st.sampled_from([1e-25, 1e-12, 1.0, 1e4]),
)
def test_what_training_leads_to_is_plausible(
    seed: int, betas: tuple[float, float], clip: float, steps: int, scale: float
) -> None:
    """Gradients that grow, shrink, change their sign, or vanish."""
    inner = InnerSection(beta1=betas[0], beta2=betas[1], clip_norm=clip)
    draw = torch.Generator().manual_seed(seed)
    weights = {"w": nn.Parameter(torch.zeros(LENGTH))}
    first, second = {"w": torch.zeros(LENGTH)}, {"w": torch.zeros(LENGTH)}
    trend = float(torch.rand((), generator=draw)) * 0.2 + 0.9
    for step in range(steps):
        noise = torch.randn(LENGTH, generator=draw) + (1.0 if seed % 2 else 0.0)
        weights["w"].grad = noise * scale * trend ** (step % 100)
        take_step(weights, first, second, step, step, inner)
    assert implausible(first["w"].numpy(), second["w"].numpy(), inner) == ""


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_one_element_that_would_throw_the_weights_far_is_found(betas: tuple[float, float]) -> None:
    inner = InnerSection(beta1=betas[0], beta2=betas[1], clip_norm=0)
    second = np.full(LENGTH, 1e-8, np.float32)
    first = np.sqrt(second)
    assert implausible(first, second, inner) == ""
    first[LENGTH // 2] *= 8
    assert "times the root of the second" in implausible(first, second, inner)
    first[LENGTH // 2] = -first[LENGTH // 2]
    assert "times the root of the second" in implausible(first, second, inner)
    first[:], second[:] = 0, 0
    first[0] = 1e-6
    assert "times the root of the second" in implausible(first, second, inner)


def test_second_moments_that_would_freeze_a_site_are_found_where_gradients_are_clipped() -> None:
    first, second = np.zeros(LENGTH, np.float32), np.full(LENGTH, 0.9 / LENGTH, np.float32)
    assert implausible(first, second, InnerSection(clip_norm=1)) == ""
    second[7] = 1e20
    assert "add up to 1e+20" in implausible(first, second, InnerSection(clip_norm=1))
    assert implausible(first, second, InnerSection(clip_norm=0)) == ""
