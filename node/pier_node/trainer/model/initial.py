"""Weights to begin with: of a run, by GPT-2's initialisation (Radford et al. 2019), or of a wide expert.

A model's feed-forward layers are widened so that it computes the same function (Net2Net, arXiv 1511.05641). The
additional units are copies of units drawn by a seed. A unit and its copies share the unit's column of the
down-projection in unequal parts, so their gradients differ from the first step on. So one seed model serves experts of
all sizes, which differ only in ffn_dim.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout, is_decayed

DEVIATION = 0.02
FIXED = 2.0**-12
"""What 1 of a fixed embedding is: their deviation is 0.018, about that of trained ones at the beginning. Eight times as
much and a quarter of it cost 6 and 4 % of the loss (`bench.pipeline_convergence`, a subspace of 16, seed 11)."""


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
    deviation = DEVIATION / (2 * layers) ** 0.5 if writes(name) else DEVIATION
    view.normal_(0.0, deviation, generator=_generator(f"{seed} {name}"))


def writes(name: str) -> bool:
    """Whether this is a matrix of a block that writes to the residual stream."""
    return name.endswith(("attention.output.weight", "mlp.down.weight"))


def _generator(key: str) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def fixed_embedding(config: ModelSection) -> Tensor:
    """What every token keeps in the channels that no block writes to, in units of FIXED: int8 [vocab_size, channels].

    Uniform, and the same at all sites of all runs: bytes of a generator whose stream NumPy promises never to change.
    """
    rows, channels = config.vocab_size, config.dim - config.written
    words = np.random.Philox(key=config.dim).random_raw(math.ceil(rows * channels / 8)).astype("<u8")
    return torch.from_numpy(words.view(np.int8)[: rows * channels].reshape(rows, channels))


def with_fixed(written: Tensor, fixed: Tensor) -> Tensor:
    """All channels of tokens, [..., dim]: those that blocks write to, and the fixed ones in units of FIXED."""
    return torch.cat([written, fixed.to(written.dtype) * FIXED], dim=-1)


LEAST = 0.25
"""Shares are drawn from LEAST to 1 before they are normalised to sum 1, so that no copy starts with almost nothing."""


def widened(narrow: ModelSection, wide: ModelSection, flat: Tensor, seed: int) -> Tensor:
    """The weights of the wide model; the same seed gives the same bits.

    Args:
        flat: weights of the narrow model, fp32 [parameters].

    Raises:
        PierError: the two differ in more than ffn_dim, or the wide one is narrower.
    """
    if not can_widen(narrow, wide):
        raise PierError(
            f"a model with ffn_dim = {narrow.ffn_dim} cannot be widened to the expert's, with ffn_dim = {wide.ffn_dim}",
            "S must be the model of the run; M and L differ from it in ffn_dim alone.",
        )
    if narrow.ffn_dim == wide.ffn_dim:
        return flat.clone()
    before, layout = Layout.of(narrow).views(flat), Layout.of(wide)
    made = torch.empty(layout.length)
    for name, view in layout.views(made).items():
        old = before[name]
        if ".mlp." in name and old.shape != view.shape:
            sources, shares = _drawn(f"{seed} {name.split('.mlp.')[0]}", narrow.ffn_dim, wide.ffn_dim)
            old = old[:, sources] * shares if ".down." in name else old[sources]
        view.copy_(old)
    return made


def can_widen(narrow: ModelSection, wide: ModelSection) -> bool:
    """Whether they are Pier's own decoder, differ only in ffn_dim, and the second is not narrower."""
    if narrow.transformers:
        return False
    one, other = (config.model_dump(exclude={"preset", "ffn_dim"}) for config in (narrow, wide))
    return one == other and narrow.ffn_dim <= wide.ffn_dim


def _drawn(key: str, narrow: int, wide: int) -> tuple[Tensor, Tensor]:
    """For each unit of the wide layer, the unit that it copies and its share of that unit's output; [wide] each."""
    dice = _generator(key)
    copies = torch.randint(narrow, (wide - narrow,), generator=dice)
    sources = torch.cat([torch.arange(narrow), copies])
    parts = LEAST + (1 - LEAST) * torch.rand(wide, generator=dice, dtype=torch.float64)
    whole = torch.zeros(narrow, dtype=torch.float64).index_add_(0, sources, parts)
    return sources, (parts / whole[sources]).float()
