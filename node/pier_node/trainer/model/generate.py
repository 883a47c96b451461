"""Generates text with a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.trainer.model.decoder import Decoder


def generate(
    model: Decoder, prompt: Sequence[int], count: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0
) -> list[int]:
    """The `count` tokens that follow `prompt`; see `stream`."""
    return list(stream(model, prompt, count, temperature, top_k, seed))


@torch.no_grad()
def stream(
    model: Decoder, prompt: Sequence[int], count: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0
) -> Iterator[int]:
    """The `count` tokens that follow `prompt`, each as soon as it is known.

    Args:
        model: a complete decoder; it sees the last `context` tokens.
        prompt: at least one token.
        count: number of tokens to generate.
        temperature: 0 always takes the likeliest token; 1 samples from the model's own distribution.
        top_k: sample among that many likeliest tokens; 0: among all.
        seed: the same seed gives the same tokens.

    Raises:
        PierError: the prompt is empty.
    """
    if not prompt:
        raise PierError("the prompt is empty", "Give at least one character to go on from.")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.config.context :]], device=device)  # [1, time]
        logits = model(window)[0, -1].float().cpu()  # [vocab]
        tokens.append(_pick(logits, temperature, top_k, generator))
        yield tokens[-1]


def _pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # Subtracting the maximum first prevents overflow at temperatures near 0.
    chances = torch.softmax((logits - logits.max()) / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
