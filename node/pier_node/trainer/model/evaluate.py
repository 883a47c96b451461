"""How well a model predicts text that it was not trained on.

SkipPipe trains for predictions with some of its stages left out, which are measured, too (arXiv 2502.19913).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub_part import HubPart
from pier_node.trainer.model.loss import NO_TOKEN

Tokens = npt.NDArray[np.int64]
Rows = npt.NDArray[np.integer[Any]]
Losses = npt.NDArray[np.float64]


def validation_loss(model: nn.Module, windows: Iterable[tuple[Tokens, Tokens]], bf16: bool = False) -> float:
    """Mean cross-entropy in nats per token, over at least one window; see `summed_losses`."""
    total, count = summed_losses(model, windows, bf16)
    return total / count


@torch.no_grad()
def summed_losses(model: nn.Module, windows: Iterable[tuple[Tokens, Tokens]], bf16: bool) -> tuple[float, int]:
    """Sum of the cross-entropy of all tokens in nats, and the number of tokens.

    Args:
        model: on any device; the windows are moved to it, one pair after the other.
        windows: inputs and targets, [sequences, context] each.
        bf16: compute under autocast to bfloat16, as a worker trains.
    """
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    for inputs, targets in windows:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(torch.from_numpy(inputs).to(device), targets=torch.from_numpy(targets).to(device))
        total += loss.cpu()
        count += int((targets != NO_TOKEN).sum())
    return total.item(), count


def row_losses(model: nn.Module, rows: Rows, at_once: int, bf16: bool = False) -> Losses:
    """Mean cross-entropy of each row in nats per token, [rows]; see `token_losses`."""
    losses = [nats.double().mean(dim=1) for nats in token_losses(model, rows, at_once, bf16)]
    return np.asarray(torch.cat(losses).numpy())


@torch.no_grad()
def token_losses(model: nn.Module, rows: Rows, at_once: int, bf16: bool = False) -> Iterator[Tensor]:
    """Cross-entropy of each token in nats, fp32 [part of the rows, context] in host memory, part by part.

    Args:
        rows: token ids, [rows, context + 1]; all but the first are predicted.
        at_once: number of rows to compute together.
    """
    device = next(model.parameters()).device
    for part in torch.split(torch.from_numpy(rows.astype(np.int64)), at_once):
        inputs, targets = part[:, :-1].to(device), part[:, 1:].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(inputs)
        nats = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        yield nats.view(targets.shape).cpu()


def bits_per_byte(loss: float, bytes_per_token: float = 1.0) -> float:
    """A loss in nats per token as bits per byte of text, which is comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token


MOST = 64
"""Maximum number of choices of stages that are measured; a larger number is sampled evenly."""


@dataclass(frozen=True)
class Omission:
    """The stages that were left out, and the loss without them in nats per token."""

    stages: tuple[int, ...]
    loss: float


def choices(stages: int, count: int) -> list[tuple[int, ...]]:
    """The choices of `count` stages to leave out: any but the first, which no path skips."""
    total = math.comb(stages - 1, count)
    return [_choice(stages, count, number) for number in range(0, total, -(-total // MOST))]


def _choice(stages: int, count: int, number: int) -> tuple[int, ...]:
    """The choice that itertools.combinations makes after `number` others, which may be too many to go through."""
    found: list[int] = []
    for stage in range(1, stages):
        if len(found) == count:
            break
        with_it = math.comb(stages - 1 - stage, count - len(found) - 1)
        if number < with_it:
            found.append(stage)
        else:
            number -= with_it
    return tuple(found)


def early_exits(stages: int) -> list[tuple[int, ...]]:
    """Choices that leave out the last stage, the last two, and so on."""
    return [tuple(range(first, stages)) for first in range(stages - 1, 0, -1)]


def omissions(
    model: Decoder | HubPart,
    windows: Sequence[tuple[Tokens, Tokens]],
    blocks: Sequence[range],
    left_out: Iterable[tuple[int, ...]],
    bf16: bool,
) -> list[Omission]:
    """The loss without each of these choices of stages.

    Args:
        windows: inputs and targets, [sequences, context] each.
        blocks: the blocks of each stage.
    """
    found = []
    for stages in left_out:
        missing = frozenset(block for stage in stages for block in blocks[stage])
        found.append(Omission(stages, validation_loss(_Shortened(model, missing), windows, bf16)))
    return found


class _Shortened(nn.Module):
    def __init__(self, model: Decoder | HubPart, missing: frozenset[int]) -> None:
        super().__init__()
        self.model, self._missing = model, missing

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        x = model.through(model.embed(tokens), without=self._missing, documents=model.documents(tokens))
        return model.loss(x, targets)
