"""What a decoder has read: keys and values of every block, so that the next token is computed alone (a KV cache)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pier_node.config import ModelSection


class LayerPast:
    """Of one block: keys and values, [1, kv_heads, context, head_dim] each, of which the first `length` are there."""

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        shape = (1, config.kv_heads, config.context, config.dim // config.heads)
        self._keys, self._values = (torch.empty(shape, device=device) for _ in range(2))
        self.length = 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in those of more tokens, [1, kv_heads, tokens, head_dim]; returns all that are known."""
        end = self.length + keys.shape[2]
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Past:
    """Of a whole decoder, for one text; it takes 8 · layers · context · dim · kv_heads / heads bytes."""

    def __init__(self, config: ModelSection, device: torch.device, blocks: Iterable[int] | None = None) -> None:
        names = range(config.layers) if blocks is None else blocks
        self._layers = {str(index): LayerPast(config, device) for index in names}
        self._context = config.context

    def layer(self, name: str) -> LayerPast:
        """That of a block, by the name that Decoder.blocks has for it."""
        return self._layers[name]

    @property
    def length(self) -> int:
        """Tokens that it knows."""
        return next(iter(self._layers.values())).length

    def begin(self, tokens: int) -> int:
        """Where so many tokens more begin. Raises ValueError: there is no room for them."""
        if self.length + tokens > self._context:
            raise ValueError(f"{self.length + tokens} tokens do not fit into a context of {self._context}")
        return self.length

    def clear(self) -> None:
        """Forget everything."""
        for layer in self._layers.values():
            layer.length = 0
