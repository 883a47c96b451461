"""What bench/codecs.py compares: Pier's codecs, hivemind's, and two other sets of 16 levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pier_node.base.shared import Vector
from pier_node.outer.codec import CODECS, Codec

NF4 = np.array(
    [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32,
)  # fmt: skip
"""Quantiles of a Gaussian (Dettmers et al., arXiv 2305.14314)."""
ABSMAX = np.linspace(-1, 1, 15, dtype=np.float32)
REFERENCE_BLOCK = 64


@dataclass(frozen=True)
class Peer:
    """One way; its encoder may raise whatever its library does.

    Attributes:
        size: bytes of what `encode` returns.
        fast: whether its speed is of interest.
    """

    name: str
    encode: Callable[[Vector], Any]
    decode: Callable[[Any], Vector]
    size: Callable[[Any], int]
    fast: bool = True


def peers() -> Iterator[Peer]:
    """All of them, in the order of the table; those without hivemind's name are Pier's."""
    for codec in CODECS.values():
        yield _pier(codec.name, codec)
    yield _reference("(4-bit absmax)", ABSMAX)
    yield _reference("(NF4)", NF4)
    yield from _hivemind()


def _pier(name: str, codec: Codec) -> Peer:
    return Peer(
        name,
        encode=lambda values: (codec.encode(values), len(values)),
        decode=lambda message: codec.decode(*message),
        size=lambda message: len(message[0]),
    )


def _hivemind() -> Iterator[Peer]:
    from hivemind import compression

    names = "Float16Compression", "ScaledFloat16Compression", "Uniform8BitQuantization"
    for name in (*names, "Quantile8BitQuantization", "BlockwiseQuantization"):
        yield _hivemind_peer(
            name.removesuffix("Compression").removesuffix("Quantization"), getattr(compression, name)()
        )


def _hivemind_peer(name: str, coder: Any) -> Peer:
    from hivemind.compression import CompressionInfo

    def encode(values: Vector) -> Any:
        tensor = torch.from_numpy(values)
        return coder.compress(tensor, CompressionInfo.from_tensor(tensor))

    return Peer(
        f"hivemind {name}",
        encode=encode,
        decode=lambda message: np.asarray(coder.extract(message).numpy(), np.float32),
        size=lambda message: len(message.buffer),
    )


def _reference(name: str, levels: Vector) -> Peer:
    """The nearest of some levels, times the absmax of a block of 64: for its error alone."""
    middles = (levels[1:] + levels[:-1]) / 2

    def encode(values: Vector) -> tuple[Any, Vector, int]:
        blocks = np.pad(values, (0, -len(values) % REFERENCE_BLOCK)).reshape(-1, REFERENCE_BLOCK)
        scales = np.abs(blocks).max(axis=1, keepdims=True)
        return np.searchsorted(middles, blocks / np.maximum(scales, 1e-30)), scales, len(values)

    return Peer(
        name,
        encode=encode,
        decode=lambda message: (levels[message[0]] * message[1]).ravel()[: message[2]],
        size=lambda message: message[2] // 2 + 2 * len(message[1]),
        fast=False,
    )
