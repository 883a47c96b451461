"""Memory that training a model takes at least, whatever the machine (spec/hdee.md section 2.4)."""

from __future__ import annotations

from pier_node.config import ModelSection
from pier_node.model.layout import Layout

STATE = 16
"""Bytes a parameter: fp32 weights, gradients and AdamW's two moments."""
LOGITS = 6
"""Bytes of a token's logit: in 16 bits, and in 32 for the loss."""
SENT = 2
"""Bytes a parameter of weights that are sent, in bf16."""


def training_bytes(config: ModelSection, sequences: int = 1) -> int:
    """Bytes of state and logits when so many sequences are computed at once; activations come on top."""
    return STATE * Layout.of(config).length + LOGITS * sequences * config.context * config.vocab_size


def sent_bytes(config: ModelSection) -> int:
    """Bytes of the weights on a line."""
    return SENT * Layout.of(config).length
