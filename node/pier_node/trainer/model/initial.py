"""The initial weights of a run: GPT-2's initialisation (Radford et al. 2019), by seed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout, is_decayed

DEVIATION = 0.02


def initial_weights(config: ModelSection, seed: int, layout: Layout | None = None) -> Tensor:
    """Flat fp32 weights of the whole model, or of the part that `layout` has, shape [Layout.length].

    Norms are 1, biases 0, and matrices normal with standard deviation 0.02. The two projections of a block that write
    to the residual stream are scaled by 1/sqrt(2 * layers). A tensor depends only on the seed and its own name, so
    depth or vocabulary can change without changing the rest.
    """
    layout = layout or Layout.of(config)
    flat = torch.empty(layout.length)
    for name, view in layout.views(flat).items():
        _fill(name, view, config.layers, seed)
    return flat


def _fill(name: str, view: Tensor, layers: int, seed: int) -> None:
    if not is_decayed(view.shape):
        view.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    to_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
    deviation = DEVIATION / (2 * layers) ** 0.5 if to_residual else DEVIATION
    view.normal_(0.0, deviation, generator=_generator(f"{seed} {name}"))


def _generator(key: str) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
