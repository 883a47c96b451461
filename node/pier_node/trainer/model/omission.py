"""How well a model predicts with some of its stages left out, for which SkipPipe trains (arXiv 2502.19913)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.evaluate import Tokens, validation_loss

MOST = 64
"""Maximum number of choices of stages that are measured; a larger number is sampled evenly."""


@dataclass(frozen=True)
class Omission:
    """The stages that were left out, and the loss without them in nats per token."""

    stages: tuple[int, ...]
    loss: float


def choices(stages: int, count: int) -> list[tuple[int, ...]]:
    """The choices of `count` stages to leave out: any but the first, which no path skips."""
    found = [*itertools.combinations(range(1, stages), count)]
    return found[:: -(-len(found) // MOST)]


def early_exits(stages: int) -> list[tuple[int, ...]]:
    """Choices that leave out the last stage, the last two, and so on."""
    return [tuple(range(first, stages)) for first in range(stages - 1, 0, -1)]


def omissions(
    model: Decoder,
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
    def __init__(self, model: Decoder, missing: frozenset[int]) -> None:
        super().__init__()
        self.model, self._missing = model, missing

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.model
        return model.predict(model.through(model.embed(tokens), without=self._missing))
