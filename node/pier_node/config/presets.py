"""Model sizes by name, as plain numbers, so that importing them is cheap.

GPT-2 sizes follow Radford et al. 2019; the 7B size follows Llama 2 (arXiv 2307.09288).
"""

from typing import Any

_LLAMA: dict[str, Any] = {"form": "llama", "vocab_size": 256, "rope_theta": 10_000.0}
_GPT2: dict[str, Any] = {"form": "gpt2", "vocab_size": 50_257, "context": 1024, "tie_embeddings": True}


def _llama(dim: int, layers: int, heads: int, ffn_dim: int, context: int, **more: Any) -> dict[str, Any]:
    shape = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": heads, "ffn_dim": ffn_dim, "context": context}
    return {**_LLAMA, "tie_embeddings": True, **shape, **more}


def _gpt2(dim: int, layers: int, heads: int) -> dict[str, Any]:
    return {**_GPT2, "dim": dim, "layers": layers, "heads": heads, "kv_heads": heads, "ffn_dim": 4 * dim}


PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(32, 2, 2, 64, 64),
    "llama-1m": _llama(128, 5, 4, 352, 128),
    "llama-30m": _llama(512, 9, 8, 1408, 512),
    "llama-125m": _llama(768, 12, 12, 2048, 1024, vocab_size=32_000),
    "llama-1b": _llama(2048, 16, 32, 5632, 2048, vocab_size=32_000, kv_heads=8),
    "llama-7b": _llama(4096, 32, 32, 11_008, 4096, vocab_size=32_000, tie_embeddings=False),
    "gpt2-1m": {**_gpt2(128, 5, 4), "vocab_size": 256, "context": 128},
    "gpt2-small": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
}
