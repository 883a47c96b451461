"""What an expert gives the text of a domain: log p of every byte, all that travels when an ensemble is scored.

Each row begins anew: its first token is predicted from the one before it alone (spec/hdee.md sections 2.6, 3.3).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from pier_node.experts.sheet import LogProbs, Rows
from pier_node.model.evaluate import token_losses

BATCH = 32
"""Rows that are computed at once."""


def log_probs(model: nn.Module, rows: Rows, done: Callable[[int], None] = lambda _rows: None) -> LogProbs:
    """Score rows, in fp32.

    Args:
        model: a whole decoder, on any device, whose context is not shorter than the rows.
        done: is told after each batch how many rows it had.
    """
    found = []
    for losses in token_losses(model, rows, BATCH):
        found.append(-losses.numpy())
        done(len(losses))
    return np.concatenate(found).astype(np.float32)


def spread(rows: Rows, most: int) -> Rows:
    """At most so many rows, from all over the text (0: all)."""
    if not most or len(rows) <= most:
        return rows
    return rows[np.arange(most) * len(rows) // most]
