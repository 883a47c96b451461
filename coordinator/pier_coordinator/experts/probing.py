"""Short probes of all domains, by n-grams in place of S, M and L: what difficulty is estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pier_coordinator.experts.difficulty import Probes
from pier_coordinator.experts.ngram import bits
from pier_coordinator.experts.problem import Array

ORDERS = (2, 3, 4)
"""Bytes of context for S, M and L."""
PARTS = (0.25, 0.5, 1.0)
"""Of the sample that is trained on."""
ROW = 512
"""Bytes that are scored as one."""


@dataclass(frozen=True)
class Sample:
    """Text of a domain: to train on, and to score."""

    train: bytes
    held_out: bytes


def probed(samples: Sequence[Sample], parameters: Array) -> Probes:
    """The losses of all domains, at as much text for each as the smallest has; `parameters` of S, M and L, [3].

    Raises:
        ValueError: a sample has less than two rows to score; its index is the argument.
    """
    rows = min(len(sample.held_out) for sample in samples) // ROW
    if rows < 2:
        raise ValueError(min(range(len(samples)), key=lambda index: len(samples[index].held_out)))
    length = min(len(sample.train) for sample in samples)
    counts = [int(part * length) for part in PARTS]
    losses = [
        np.concatenate([_rows(sample.train[:count], sample.held_out[: rows * ROW]) for count in counts])
        for sample in samples
    ]
    points = len(PARTS)
    return Probes(np.tile(parameters, points), np.repeat(np.array(counts, float), len(ORDERS)), np.stack(losses))


def _rows(train: bytes, text: bytes) -> Array:
    """Bits per byte of each row, [orders, rows]."""
    return np.asarray(bits(train, text, ORDERS).reshape(len(ORDERS), -1, ROW).mean(axis=-1))
