from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pier_node.config.run import InnerSection, ModelSection
from pier_node.outer.inner_optimizer import ITERATIONS, QUINTIC, Moments, Orthogonal, step_vectors, take_step
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import learning_rate

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


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (4, 5e-4),
        (9, 1e-3),
        (10, 1e-3),
        (87, 1e-3),
        (88, 1e-3),
        (93, 1e-4 + 9e-4 * (1 - math.sqrt(5 / 22))),
        (110, 1e-4),
    ],
)
def test_warmup_stable_decay_has_its_golden_values(step: int, rate: float) -> None:
    config = SCHEDULE.model_copy(update={"schedule": "wsd", "decay_fraction": 0.2})
    assert learning_rate(step, config) == pytest.approx(rate, rel=1e-12)


def test_a_decay_as_long_as_the_run_begins_after_the_warmup() -> None:
    config = SCHEDULE.model_copy(update={"schedule": "wsd", "decay_fraction": 1.0})
    assert learning_rate(10, config) == 1e-3
    assert learning_rate(35, config) == pytest.approx(1e-4 + 9e-4 / 2, rel=1e-12)


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(0, SCHEDULE.model_copy(update={"warmup_steps": 0})) == 1e-3


@given(st.integers(0, 500), st.integers(0, 300), st.integers(1, 300), st.sampled_from(["cosine", "wsd"]))
def test_rates_stay_within_their_bounds(step: int, warmup: int, total: int, schedule: Literal["cosine", "wsd"]) -> None:
    config = InnerSection(lr=1e-3, min_lr=1e-4, warmup_steps=warmup, total_steps=total, schedule=schedule)
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
        take_step(ours, Moments(first, second, step), step, config)
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
    take_step(parameters, Moments(_zeros(parameters), _zeros(parameters), 0), 10, SCHEDULE)
    torch.testing.assert_close(parameters["matrix"], before["matrix"] * (1 - 1e-3 * 0.1))
    assert torch.equal(parameters["bias"], before["bias"])


def test_a_parameter_that_took_no_part_stays() -> None:
    parameters = _parameters()
    _give_gradients(parameters, 1)
    before = parameters["matrix"].detach().clone()
    parameters["matrix"].grad = None
    take_step(parameters, Moments(_zeros(parameters), _zeros(parameters), 0), 10, SCHEDULE)
    assert torch.equal(parameters["matrix"], before)


def test_steps_are_those_of_torchs_sgd_with_decoupled_decay() -> None:
    config = SCHEDULE.model_copy(update={"optimizer": "sgd", "momentum": 0.9, "clip_norm": 0.0})
    ours, theirs = _parameters(), _parameters()
    moments = _zeros(ours), _zeros(ours)
    reference = torch.optim.SGD(theirs.values(), momentum=0.9)
    for step in range(20):
        _give_gradients(ours, step)
        _give_gradients(theirs, step)
        take_step(ours, Moments(*moments, step), step, config)
        (group,) = reference.param_groups
        group["lr"] = learning_rate(step, config)
        for name in ("matrix", "embedding"):
            theirs[name].data *= 1 - learning_rate(step, config) * config.weight_decay
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)
        assert not moments[1][name].any()


MUON = SCHEDULE.model_copy(update={"optimizer": "muon", "clip_norm": 0.0})


def _hidden(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(33, 17), (17, 33), (24, 24)])
def test_steps_are_those_of_torchs_muon(shape: tuple[int, int], exact: bool) -> None:
    """PyTorch orthogonalises in bfloat16, which has 8 bits."""
    ours, theirs = {"w": _hidden(*shape)}, _hidden(*shape)
    before = theirs.detach().clone()
    moments = _zeros(ours), _zeros(ours)
    reference = torch.optim.Muon([theirs], momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(10):
        _give_gradients(ours, step)
        _give_gradients({"w": theirs}, step)
        take_step(ours, Moments(*moments, step), step, MUON, Orthogonal(exact))
        reference.param_groups[0]["lr"] = learning_rate(step, MUON)
        reference.step()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(moments[0]["w"], reference.state[theirs]["momentum_buffer"], rtol=1e-5, atol=1e-6)
    assert (ours["w"] - theirs).norm() < 0.01 * (theirs - before).norm()
    assert not moments[1]["w"].any()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(60, 20), (20, 60), (64, 64)])
def test_muon_replaces_singular_values_by_those_of_the_quintic(shape: tuple[int, int], exact: bool) -> None:
    weight = {"w": nn.Parameter(torch.zeros(shape))}
    _give_gradients(weight, 7)
    gradient = weight["w"].grad
    assert gradient is not None
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values /= values.norm()
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    expected = left @ values.diag() @ right * -1e-3 * 0.2 * math.sqrt(max(shape))
    take_step(weight, Moments(_zeros(weight), _zeros(weight), 0), 10, MUON, Orthogonal(exact))
    assert (weight["w"] - expected).norm() < 1e-4 * expected.norm()


def test_muons_steps_are_as_large_as_adamws() -> None:
    """0.2 of the learning rate, measured by the root mean square (arXiv 2502.16982)."""
    weight = {"w": nn.Parameter(torch.zeros(96, 64))}
    _give_gradients(weight, 1)
    take_step(weight, Moments(_zeros(weight), _zeros(weight), 0), 10, MUON)
    assert 0.15e-3 < weight["w"].square().mean().sqrt() < 0.25e-3


@pytest.mark.parametrize("exact", [False, True])
def test_muon_moves_each_of_many_matrices_as_if_it_were_alone(exact: bool) -> None:
    """Five of 0.36 million elements are more than fit in one batch."""
    shapes = [(600, 600), (24, 40), (600, 600), (40, 24), (600, 600), (600, 600), (600, 600), (24, 40)]
    names = [str(index) for index in range(len(shapes))]
    together, alone = ({name: _hidden(*shape) for name, shape in zip(names, shapes, strict=True)} for _ in range(2))
    for parameters in (together, alone):
        _give_gradients(parameters, 5)
    take_step(together, Moments(_zeros(together), _zeros(together), 0), 10, MUON, Orthogonal(exact))
    for name, weight in alone.items():
        one = {name: weight}
        take_step(one, Moments(_zeros(one), _zeros(one), 0), 10, MUON, Orthogonal(exact))
        torch.testing.assert_close(together[name], weight, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)


def test_muon_leaves_embeddings_head_and_vectors_to_adamw() -> None:
    generator = torch.Generator().manual_seed(3)
    flat, gradient = torch.randn(2, LAYOUT.length, generator=generator)
    muon, adamw = flat.clone(), flat.clone()
    moments = torch.zeros(4, LAYOUT.length)
    step_vectors(LAYOUT, muon, (moments[0], moments[1], 0), gradient.clone(), 10, MUON)
    step_vectors(
        LAYOUT, adamw, (moments[2], moments[3], 0), gradient.clone(), 10, SCHEDULE.model_copy(update={"clip_norm": 0.0})
    )
    same = {name for name, view in LAYOUT.views(muon == adamw).items() if view.all()}
    assert same == {it.name for it in LAYOUT.entries if "norm" in it.name or it.name == "embedding.weight"}


def test_muons_exact_step_does_not_depend_on_the_order_of_summation() -> None:
    """Columns in another order are summed in another order: the result is the same, but for the order."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    one, other = {"w": nn.Parameter(torch.zeros(24, 40))}, {"w": nn.Parameter(torch.zeros(24, 40))}
    for step in range(3):
        _give_gradients(one, step)
        _give_gradients(other, step)
        gradient = one["w"].grad
        assert gradient is not None
        other["w"].grad = gradient[:, order].contiguous()
    for weight in (one, other):
        take_step(weight, Moments(_zeros(weight), _zeros(weight), 0), 10, MUON, Orthogonal(exact=True))
    assert torch.equal(one["w"][:, order], other["w"])


def test_muon_stands_still_without_a_gradient() -> None:
    for exact in (False, True):
        weight = {"w": nn.Parameter(torch.ones(8, 4))}
        weight["w"].grad = torch.zeros(8, 4)
        take_step(weight, Moments(_zeros(weight), _zeros(weight), 0), 10, MUON, Orthogonal(exact))
        torch.testing.assert_close(weight["w"].detach(), torch.full((8, 4), 1 - 1e-3 * 0.1))


def _worker_steps(flat: Tensor, gradients: list[Tensor]) -> Tensor:
    """AdamW as a worker has it: every tensor in memory of its own."""
    parameters = {name: nn.Parameter(view.clone()) for name, view in LAYOUT.views(flat).items()}
    first, second = _zeros(parameters), _zeros(parameters)
    for step, gradient in enumerate(gradients):
        for name, view in LAYOUT.views(gradient).items():
            parameters[name].grad = view.clone()
        take_step(parameters, Moments(first, second, step), step, SCHEDULE)
    stored = torch.empty(3, LAYOUT.length)
    states: list[Mapping[str, Tensor]] = [parameters, first, second]
    for tensors, row in zip(states, stored):
        LAYOUT.store(tensors, row)
    return stored


def _daemon_steps(flat: Tensor, gradients: list[Tensor], config: InnerSection = SCHEDULE) -> Tensor:
    """An optimizer as a daemon has it: views of flat vectors."""
    stored = torch.stack([flat, torch.zeros_like(flat), torch.zeros_like(flat)])
    for step, gradient in enumerate(gradients):
        step_vectors(LAYOUT, stored[0], (stored[1], stored[2], step), gradient.clone(), step, config)
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


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_every_daemon_takes_the_same_step_with_any_number_of_threads(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(LAYOUT.length, generator=generator)
    gradients = [torch.randn(LAYOUT.length, generator=generator) for _ in range(2)]
    config = SCHEDULE.model_copy(update={"optimizer": optimizer})
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(_daemon_steps(flat, gradients, config))
    assert torch.equal(*results)
