"""Arithmetic of training, counted once for every report and every plan (PaLM, arXiv 2204.02311, appendix B).

Memory that training a model takes at least, whatever the machine (spec/hdee.md section 2.4).
"""

from __future__ import annotations

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout


def flops_per_token(config: ModelSection) -> float:
    """Floating-point operations of a forward and a backward pass, per token: 6 N + 12 layers * dim * context.

    N leaves out what is looked up rather than multiplied: positions, and the token embedding unless it is the head as
    well. The second term is attention's scores and sums, counted without the causal half, as is usual.
    """
    looked_up = {"positions.weight"} if config.tie_embeddings else {"positions.weight", "embedding.weight"}
    multiplied = sum(entry.size for entry in Layout.of(config).entries if entry.name not in looked_up)
    return 6.0 * multiplied + 12.0 * config.layers * config.dim * config.context


def forward_flops_per_token(config: ModelSection) -> float:
    """Those of predicting a token without learning from it: a backward pass costs twice a forward one."""
    return flops_per_token(config) / 3


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
