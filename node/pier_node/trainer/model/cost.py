"""The cost of training: FLOPs (PaLM, arXiv 2204.02311, appendix B) and memory, defined once for reports and plans.

The memory is the minimum that training a model takes, independent of the machine.
"""

from __future__ import annotations

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout


def flops_per_token(config: ModelSection) -> float:
    """Floating-point operations of a forward and a backward pass, per token: 6 N + 12 layers * dim * context.

    N excludes parameters that are looked up rather than multiplied: positions, and the token embedding unless it is
    also the head. The second term is attention's scores and sums, without a discount for causality, as is usual.
    """
    looked_up = {"positions.weight"} if config.tie_embeddings else {"positions.weight", "embedding.weight"}
    multiplied = sum(entry.size for entry in Layout.of(config).entries if entry.name not in looked_up)
    return 6.0 * multiplied + 12.0 * config.layers * config.dim * config.context


def forward_flops_per_token(config: ModelSection) -> float:
    """FLOPs per token of prediction without training: a backward pass costs twice a forward pass."""
    return flops_per_token(config) / 3


STATE = 16
"""Bytes per parameter: fp32 weights, gradients and AdamW's two moments."""
LOGITS = 6
"""Bytes per logit: 16 bits, plus 32 bits for the loss."""
SENT = 2
"""Bytes per parameter for sending weights in bf16."""


def training_bytes(config: ModelSection, sequences: int = 1) -> int:
    """Bytes of state and logits when that many sequences are computed at once; activations are additional."""
    return STATE * Layout.of(config).length + LOGITS * sequences * config.context * config.vocab_size


def sent_bytes(config: ModelSection) -> int:
    """Bytes of the weights in transit."""
    return SENT * Layout.of(config).length
