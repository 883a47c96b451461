from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.replica import mean_gradient

CONFIG = ModelSection(preset="llama-tiny", context=16)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(1)
    return Decoder(CONFIG)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (5, 17), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def _gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("micro_batch", [0, 1, 2, 5, 9])
def test_gradient_and_loss_are_those_of_the_mean(model: Decoder, rows: tuple[Tensor, Tensor], micro_batch: int) -> None:
    loss = F.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())
    torch.autograd.backward(loss)
    expected = _gradients(model)
    computed = mean_gradient(model, *rows, len(rows[0]), micro_batch, bf16=False)
    torch.testing.assert_close(computed, loss.detach())
    torch.testing.assert_close(_gradients(model), expected, rtol=1e-4, atol=1e-7)


def test_parts_of_unequal_size_add_up_to_the_sites_gradient(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    mean_gradient(model, *rows, 5, 0, bf16=False)
    whole = _gradients(model)
    losses, parts = [], []
    for part in (slice(0, 2), slice(2, 5)):
        losses.append(mean_gradient(model, rows[0][part], rows[1][part], 5, 0, bf16=False))
        parts.append(_gradients(model))
    torch.testing.assert_close([a + b for a, b in zip(*parts)], whole, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(sum(losses), mean_gradient(model, *rows, 5, 0, bf16=False))


def test_gradients_do_not_pile_up_from_call_to_call(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    mean_gradient(model, *rows, 5, 2, bf16=False)
    once = _gradients(model)
    mean_gradient(model, *rows, 5, 2, bf16=False)
    torch.testing.assert_close(_gradients(model), once, rtol=0, atol=0)


def test_bf16_is_near_and_leaves_fp32_gradients(model: Decoder, rows: tuple[Tensor, Tensor]) -> None:
    exact = mean_gradient(model, *rows, 5, 0, bf16=False)
    near = mean_gradient(model, *rows, 5, 0, bf16=True)
    assert 0.0 < abs(near - exact) < 0.05
    assert all(gradient.dtype == torch.float32 for gradient in _gradients(model))
