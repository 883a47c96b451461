import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.initial import initial_weights


def named(config: ModelSection, seed: int) -> dict[str, Tensor]:
    return Layout.of(config).views(initial_weights(config, seed))


def test_the_seed_and_nothing_else_decides(config: ModelSection) -> None:
    first = initial_weights(config, 7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(initial_weights(config, 7), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(initial_weights(config, 8), first)
    assert first.dtype == torch.float32


def test_no_two_tensors_are_alike(config: ModelSection) -> None:
    starts = [view.flatten()[:4] for view in named(config, 1).values() if view.ndim == 2]
    assert len({tuple(start.tolist()) for start in starts}) == len(starts)


@pytest.mark.parametrize("preset", ["llama-1m", "gpt2-1m"])
def test_deviations_norms_and_biases(preset: str) -> None:
    config = ModelSection(preset=preset)
    for name, view in named(config, 1).items():
        if name.endswith(".bias"):
            assert view.eq(0).all()
        elif "norm" in name:
            assert view.eq(1).all()
        else:
            residual = name.endswith(("output.weight", "down.weight"))
            # 5 layers: 0.02 / sqrt(10). A deviation over 16384 elements is itself off by 0.6 %.
            assert view.std().item() == pytest.approx(0.0063245553 if residual else 0.02, rel=0.03)
            assert abs(view.mean().item()) < 5 * 0.02 / math.sqrt(view.numel())


def test_a_tensor_does_not_depend_on_the_rest_of_the_model() -> None:
    small, large = (ModelSection(preset="llama-tiny", layers=layers) for layers in (2, 3))
    shallow, deep = named(small, 3), named(large, 3)
    assert torch.equal(shallow["blocks.1.mlp.gate.weight"], deep["blocks.1.mlp.gate.weight"])


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-1m", "gpt2-1m"])
def test_the_first_loss_is_that_of_a_guess(preset: str) -> None:
    config = ModelSection(preset=preset)
    model = Decoder(config)
    Layout.of(config).load(model, initial_weights(config, 1))
    x = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.06)
