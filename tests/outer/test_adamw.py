from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pier_node.config.run import InnerSection, ModelSection
from pier_node.outer.adamw import step_vectors, take_step
from pier_node.outer.layout import Layout
from pier_node.outer.learning_rate import learning_rate

SCHEDULE = InnerSection(lr=1e-3, min_lr=1e-4, warmup_steps=10, total_steps=110)
ODD = ModelSection(preset="llama-tiny", vocab_size=251, dim=34, heads=1, ffn_dim=37)
LAYOUT = Layout.of(ODD)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-4),
        (4, 5e-4),
        (9, 1e-3),
        (10, 1e-3),
        (35, 1e-4 + 4.5e-4 * (1 + math.sqrt(0.5))),
        (60, 5.5e-4),
        (110, 1e-4),
        (10**6, 1e-4),
    ],
)
def test_learning_rate_has_its_golden_values(step: int, rate: float) -> None:
    assert learning_rate(step, SCHEDULE) == pytest.approx(rate, rel=1e-12)


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(0, SCHEDULE.model_copy(update={"warmup_steps": 0})) == 1e-3


@given(st.integers(0, 500), st.integers(0, 300), st.integers(1, 300))
def test_rates_stay_within_their_bounds(step: int, warmup: int, total: int) -> None:
    config = InnerSection(lr=1e-3, min_lr=1e-4, warmup_steps=warmup, total_steps=total)
    assert 0.0 < learning_rate(step, config) <= 1e-3 * (1 + 1e-12)
    assert step < warmup or learning_rate(step, config) >= 1e-4


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"matrix": (33, 17), "bias": (33,), "embedding": (101, 7)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def _zeros(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}


def _give_gradients(parameters: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_steps_are_those_of_torchs_adamw(clip: float) -> None:
    config = SCHEDULE.model_copy(update={"clip_norm": clip})
    ours, theirs = _parameters(), _parameters()
    first, second = _zeros(ours), _zeros(ours)
    decayed = [theirs["matrix"], theirs["embedding"]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [theirs["bias"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.999), foreach=False)
    for step in range(20):
        _give_gradients(ours, step)
        _give_gradients(theirs, step)
        take_step(ours, first, second, step, step, config)
        if clip:
            nn.utils.clip_grad_norm_(theirs.values(), clip)
        for group in reference.param_groups:
            group["lr"] = learning_rate(step, config)
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


def test_without_a_gradient_only_matrices_shrink() -> None:
    parameters = _parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    take_step(parameters, _zeros(parameters), _zeros(parameters), 0, 10, SCHEDULE)
    torch.testing.assert_close(parameters["matrix"], before["matrix"] * (1 - 1e-3 * 0.1))
    assert torch.equal(parameters["bias"], before["bias"])


def _worker_steps(flat: Tensor, gradients: list[Tensor]) -> Tensor:
    """AdamW as a worker has it: every tensor in memory of its own."""
    parameters = {name: nn.Parameter(view.clone()) for name, view in LAYOUT.views(flat).items()}
    first, second = _zeros(parameters), _zeros(parameters)
    for step, gradient in enumerate(gradients):
        for name, view in LAYOUT.views(gradient).items():
            parameters[name].grad = view.clone()
        take_step(parameters, first, second, step, step, SCHEDULE)
    stored = torch.empty(3, LAYOUT.length)
    states: list[Mapping[str, Tensor]] = [parameters, first, second]
    for tensors, row in zip(states, stored):
        LAYOUT.store(tensors, row)
    return stored


def _daemon_steps(flat: Tensor, gradients: list[Tensor]) -> Tensor:
    """AdamW as a daemon has it: views of flat vectors."""
    stored = torch.stack([flat, torch.zeros_like(flat), torch.zeros_like(flat)])
    for step, gradient in enumerate(gradients):
        step_vectors(LAYOUT, stored[0], (stored[1], stored[2], step), gradient.clone(), step, SCHEDULE)
    return stored


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_worker_and_daemon_take_the_same_step_to_the_last_bit(threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(LAYOUT.length, generator=generator)
    gradients = [torch.randn(LAYOUT.length, generator=generator) for _ in range(4)]
    expected = _worker_steps(flat, gradients)
    torch.set_num_threads(threads)
    assert torch.equal(_daemon_steps(flat, gradients), expected)
    assert not torch.equal(expected[0], flat)
