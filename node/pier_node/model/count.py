"""How many parameters a model has, without building it: arithmetic over the shapes of decoder.py, and no torch."""

from __future__ import annotations

from pier_node.config import ModelSection


def parameter_count(config: ModelSection) -> int:
    """Parameters of the whole model, tied ones once."""
    gpt2 = config.form == "gpt2"
    tables = config.vocab_size * (1 if config.tie_embeddings else 2) + (config.context if gpt2 else 0)
    norm = config.dim * (2 if gpt2 else 1)
    return tables * config.dim + config.layers * (_attention(config) + _feed_forward(config) + 2 * norm) + norm


def _attention(config: ModelSection) -> int:
    dim, shared = config.dim, config.kv_heads * config.dim // config.heads
    biases = 2 * dim + 2 * shared if config.form == "gpt2" else 0
    return 2 * dim * dim + 2 * dim * shared + biases


def _feed_forward(config: ModelSection) -> int:
    dim, wide = config.dim, config.ffn_dim
    return 2 * dim * wide + wide + dim if config.form == "gpt2" else 3 * dim * wide
