"""Names and shapes of a model's parameters, in the order of decoder.py, without building it.

No torch is needed. A daemon, which knows a model as a flat vector, starts the sooner for it, and is back the sooner.
"""

from __future__ import annotations

from collections.abc import Iterator

from pier_node.config import ModelSection

Named = Iterator[tuple[str, tuple[int, ...]]]


def shapes(config: ModelSection) -> Named:
    """Every parameter of the whole model; tied ones once."""
    yield "embedding.weight", (config.vocab_size, config.dim)
    if config.form == "gpt2":
        yield "positions.weight", (config.context, config.dim)
    for index in range(config.layers):
        for name, shape in _block(config):
            yield f"blocks.{index}.{name}", shape
    yield from _norm(config, "norm")
    if not config.tie_embeddings:
        yield "head.weight", (config.vocab_size, config.dim)


def _block(config: ModelSection) -> Named:
    dim, shared, wide = config.dim, config.kv_heads * config.dim // config.heads, config.ffn_dim
    yield from _norm(config, "attention_norm")
    for name, rows in (("query", dim), ("key", shared), ("value", shared), ("output", dim)):
        yield from _linear(config, f"attention.{name}", rows, dim)
    yield from _norm(config, "mlp_norm")
    for name in ("gate", "up") if config.form == "llama" else ("up",):
        yield from _linear(config, f"mlp.{name}", wide, dim)
    yield from _linear(config, "mlp.down", dim, wide)


def _linear(config: ModelSection, name: str, rows: int, columns: int) -> Named:
    yield f"{name}.weight", (rows, columns)
    if config.form == "gpt2":
        yield f"{name}.bias", (rows,)


def _norm(config: ModelSection, name: str) -> Named:
    yield f"{name}.weight", (config.dim,)
    if config.form == "gpt2":
        yield f"{name}.bias", (config.dim,)
