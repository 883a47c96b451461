"""The canonical flat layout: every parameter of the whole model, one after another, in one vector.

The order is that of `named_parameters()` of the model, Pier's own (trainer/model/decoder.py) or transformers'. So the
same index means the same number at a site with one device, with eight, or with only a range of the blocks.

Names and shapes come from the configuration: no model is built, and torch is not needed. So a daemon, which knows a
model only as a flat vector, starts and restarts faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pier_node.config.pretrained import block_of
from pier_node.config.run import ModelSection, RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


Named = Iterator[tuple[str, tuple[int, ...]]]


def shapes(config: ModelSection) -> Named:
    """Every parameter of the whole model; tied parameters appear once."""
    if config.transformers:
        yield from config.transformers.shapes()
        return
    yield "embedding.weight", (config.vocab_size, config.written)
    if config.form == "gpt2":
        yield "positions.weight", (config.context, config.dim)
    for index in range(config.layers):
        for name, shape in _block(config):
            yield f"blocks.{index}.{name}", shape
    yield from _layer(config, "norm", config.dim)
    if not config.tie_embeddings:
        yield "head.weight", (config.vocab_size, config.dim)


def _block(config: ModelSection) -> Named:
    dim, shared, wide = config.dim, config.kv_heads * config.dim // config.heads, config.ffn_dim
    yield from _layer(config, "attention_norm", dim)
    for name, rows in (("query", dim), ("key", shared), ("value", shared), ("output", config.written)):
        yield from _layer(config, f"attention.{name}", rows, dim)
    yield from _layer(config, "mlp_norm", dim)
    for name in ("gate", "up") if config.form == "llama" else ("up",):
        yield from _layer(config, f"mlp.{name}", wide, dim)
    yield from _layer(config, "mlp.down", config.written, wide)


def _layer(config: ModelSection, name: str, *shape: int) -> Named:
    """A norm, or a linear layer of rows and columns."""
    yield f"{name}.weight", shape
    if config.form == "gpt2":
        yield f"{name}.bias", shape[:1]


@dataclass(frozen=True)
class Entry:
    """Where a parameter lies: it is flat[offset : offset + size], in row-major order."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def block(self) -> int | None:
        """Index of the block that it belongs to; None: it is outside of the blocks."""
        return block_of(self.name)


@dataclass(frozen=True)
class Layout:
    """The entries of a whole model, in canonical order; tied parameters appear once."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, config: ModelSection) -> Self:
        """The layout of a model, from its configuration alone."""
        return cls.laid(shapes(config))

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        """The layout of what a run trains: Pier's decoder, or the model of its users' program."""
        return cls.laid(config.program.shapes()) if config.program else cls.of(config.model)

    @classmethod
    def laid(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Self:
        """Lay out parameters of these names and shapes one after another."""
        entries, offset = list[Entry](), 0
        for name, shape in shapes:
            entries.append(Entry(name, shape, offset))
            offset += entries[-1].size
        return cls(tuple(entries))

    @property
    def length(self) -> int:
        """Number of elements of the flat vector: the parameter count of the model."""
        return self.entries[-1].offset + self.entries[-1].size

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views into `flat`, shape [length], any dtype or device. ValueError if the shape differs."""
        if flat.shape != (self.length,):
            raise ValueError(f"a vector of shape {list(flat.shape)} cannot hold the model's [{self.length}] parameters")
        return {entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape) for entry in self.entries}

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Set those parameters that `model` has (all, or a range of blocks) from `flat`, in the model's dtype."""
        views = self.views(flat)
        for name, parameter in model.named_parameters():
            parameter.detach().copy_(views[name])

    def store(self, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        """Write tensors (parameters, gradients, moments), named like the parameters, to their places in `flat`.

        Raises:
            KeyError: a name is not in the layout.
            ValueError: a tensor does not have its parameter's shape.
        """
        views = self.views(flat)
        for name, tensor in tensors.items():
            if tensor.shape != views[name].shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(views[name].shape)}")
            views[name].copy_(tensor.detach())


OUTSIDE = ("embedding.weight", "positions.weight", "head.weight")
"""Matrices that map to or from tokens and positions."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter maps one hidden vector to another: those are what Muon is for."""
    return len(shape) == 2 and name not in OUTSIDE


def is_decayed(shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter of this shape: to matrices, not to norms and biases."""
    return len(shape) >= 2
