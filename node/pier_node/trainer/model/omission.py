"""How well a model predicts with some of its stages left out, as SkipPipe trains for (spec/skippipe.md section 6)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.evaluate import Tokens, validation_loss

MOST = 64
"""Choices of stages that are measured; of more every so-manieth."""


@dataclass(frozen=True)
class Omission:
    """Stages that were left out, and the loss without them, nats a token."""

    stages: tuple[int, ...]
    loss: float


def choices(stages: int, count: int) -> list[tuple[int, ...]]:
    """Which stages may be left out, so many at a time: any but the first, which no path skips."""
    found = [*itertools.combinations(range(1, stages), count)]
    return found[:: -(-len(found) // MOST)]


def early_exits(stages: int) -> list[tuple[int, ...]]:
    """The last stage, the last two, and so on, left out."""
    return [tuple(range(first, stages)) for first in range(stages - 1, 0, -1)]


def omissions(
    model: Decoder,
    windows: Sequence[tuple[Tokens, Tokens]],
    blocks: Sequence[range],
    left_out: Iterable[tuple[int, ...]],
    bf16: bool,
) -> list[Omission]:
    """The loss without each of these stages.

    Args:
        windows: inputs and targets, [sequences, context] each.
        blocks: those of each stage.
    """
    found = []
    for stages in left_out:
        missing = frozenset(block for stage in stages for block in blocks[stage])
        found.append(Omission(stages, validation_loss(_Shortened(model, missing), windows, bf16)))
    return found


class _Shortened(nn.Module):
    def __init__(self, model: Decoder, missing: frozenset[int]) -> None:
        super().__init__()
        self.model, self._missing = model, missing

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.model
        return model.predict(model.through(model.embed(tokens), without=self._missing))
