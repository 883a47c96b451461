"""The loss in chunks is the loss of all logits, and so are its gradients; no chunk has more logits than it may."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pier_node.trainer.model import loss as module
from pier_node.trainer.model.cost import CHUNK
from pier_node.trainer.model.loss import NO_TOKEN, summed_loss

ROWS, CONTEXT, DIM, VOCAB = 3, 7, 16, 101


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, CONTEXT, DIM, generator=generator).requires_grad_()
    head = torch.randn(VOCAB, DIM, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (ROWS, CONTEXT), generator=generator)
    targets[1, 2:5] = NO_TOKEN
    return hidden, head, targets


def _results(z_loss: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden, head, targets = _inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = summed_loss(hidden, head, targets, z_loss)
    torch.autograd.backward(loss / 5)
    assert hidden.grad is not None
    assert head.grad is not None
    return [loss.detach(), hidden.grad, head.grad]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_chunks_add_up_to_the_whole(tokens: int, z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _results(z_loss)
    monkeypatch.setattr(module, "CHUNK", tokens * VOCAB)
    for ours, theirs in zip(_results(z_loss), whole):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_under_bfloat16_chunks_are_as_exact_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, whole = _results(0.0), _results(0.0, torch.bfloat16)
    monkeypatch.setattr(module, "CHUNK", 4 * VOCAB)
    for ours, theirs, right in zip(_results(0.0, torch.bfloat16), whole, exact):
        assert ours.dtype == right.dtype
        assert (ours - right).norm() < 1.5 * (theirs - right).norm() + 1e-2


@pytest.mark.parametrize("chunk", [CHUNK, 4 * VOCAB])
def test_the_z_loss_is_the_square_of_the_normalizer(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    hidden, head, targets = _inputs()
    logits = functional.linear(hidden, head)
    expected = 0.5 * (logits.logsumexp(-1).square() * (targets != NO_TOKEN)).sum()
    torch.testing.assert_close(summed_loss(hidden, head, targets, 0.5) - summed_loss(hidden, head, targets), expected)


def test_validation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4 * VOCAB)
    hidden, head, targets = _inputs()
    with torch.no_grad():
        loss = summed_loss(hidden, head, targets)
    assert not loss.requires_grad
