"""Whatever the gradients were, the optimizer's state is within the bounds; and what no gradients lead to is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pier_node.config.run import InnerSection, ModelSection
from pier_node.outer.inner_optimizer import Moments, step_vectors, take_step
from pier_node.outer.layout import Layout
from pier_node.outer.moment_bounds import MomentBounds

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
        take_step(weights, Moments(first, second, step), step, inner)
    assert MomentBounds(inner).flaw(first["w"].numpy(), second["w"].numpy()) == ""


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_one_element_that_would_throw_the_weights_far_is_found(betas: tuple[float, float]) -> None:
    inner = InnerSection(beta1=betas[0], beta2=betas[1], clip_norm=0)
    second = np.full(LENGTH, 1e-8, np.float32)
    first = np.sqrt(second)
    assert MomentBounds(inner).flaw(first, second) == ""
    first[LENGTH // 2] *= 8
    assert "times the root of the second" in MomentBounds(inner).flaw(first, second)
    first[LENGTH // 2] = -first[LENGTH // 2]
    assert "times the root of the second" in MomentBounds(inner).flaw(first, second)
    first[:], second[:] = 0, 0
    first[0] = 1e-6
    assert "times the root of the second" in MomentBounds(inner).flaw(first, second)


def test_second_moments_that_would_freeze_a_site_are_found_where_gradients_are_clipped() -> None:
    first, second = np.zeros(LENGTH, np.float32), np.full(LENGTH, 0.9 / LENGTH, np.float32)
    assert MomentBounds(InnerSection(clip_norm=1)).flaw(first, second) == ""
    second[7] = 1e20
    assert "add up to 1e+20" in MomentBounds(InnerSection(clip_norm=1)).flaw(first, second)
    assert MomentBounds(InnerSection(clip_norm=0)).flaw(first, second) == ""


SMALL = ModelSection(preset="llama-tiny", vocab_size=20, dim=8, heads=1, ffn_dim=6, layers=1)
LAYOUT = Layout.of(SMALL)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["muon", "sgd"]), st.integers(0, 2**31), st.floats(0.0, 0.99), st.sampled_from([1e-12, 1.0, 1e4])
)
def test_what_training_with_a_momentum_leads_to_is_plausible(
    name: str, seed: int, momentum: float, scale: float
) -> None:
    """Gradients that always point the same way make the largest momentum."""
    inner = InnerSection.model_validate({"optimizer": name, "momentum": momentum})
    draw = torch.Generator().manual_seed(seed)
    weights, first, second = torch.zeros(3, LAYOUT.length)
    always = torch.randn(LAYOUT.length, generator=draw) * scale
    for step in range(30):
        gradient = always if seed % 2 else torch.randn(LAYOUT.length, generator=draw) * scale
        step_vectors(LAYOUT, weights, (first, second, step), gradient.clone(), step, inner)
    assert MomentBounds.of(inner, LAYOUT).flaw(first.numpy(), second.numpy()) == ""
    assert first.any()


@pytest.mark.parametrize(("name", "norm"), [("muon", 1.0), ("sgd", 20.0)])
def test_a_momentum_that_clipped_gradients_do_not_make_is_found(name: str, norm: float) -> None:
    inner = InnerSection.model_validate({"optimizer": name, "momentum": 0.95, "clip_norm": 1.0})
    bounds = MomentBounds.of(inner, LAYOUT)
    first, second = np.zeros(LAYOUT.length, np.float32), np.zeros(LAYOUT.length, np.float32)
    (query,) = (entry for entry in LAYOUT.entries if entry.name == "blocks.0.attention.query.weight")
    part = slice(query.offset, query.offset + query.size)
    first[part] = norm / 8
    assert bounds.flaw(first, second) == ""
    first[part] *= 1.1
    assert f"a momentum of norm {norm * 1.1:.3g}: gradients are clipped to 1" == bounds.flaw(first, second)
    first[part], second[part.start] = 0, 1e-3
    assert f"second moments where {name} has none" == bounds.flaw(first, second)


def test_muon_leaves_the_bounds_of_adamw_to_the_parameters_that_have_adamw() -> None:
    bounds = MomentBounds.of(InnerSection(optimizer="muon"), LAYOUT)
    first, second = np.zeros(LAYOUT.length, np.float32), np.zeros(LAYOUT.length, np.float32)
    first[0], second[0] = 0.1, 0.1
    assert bounds.flaw(first, second) == ""
    second[0] = 1e-6
    assert "times the root of the second" in bounds.flaw(first, second)
    first[0], second[-1] = 0, 1e20
    assert "add up to 1e+20" in bounds.flaw(first, second)
