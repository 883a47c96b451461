"""Model sizes by name, and how each is trained, as plain numbers, so that importing them is cheap.

GPT-2 sizes follow Radford et al. 2019; the 7B size follows Llama 2 (arXiv 2307.09288).

A recipe is what `pier-node init` writes for a size. It is no default: a run.toml that leaves a key out means the same
with every preset. Learning rate, batch and warmup are those published for a model of about this size: GPT-3 (arXiv
2005.14165, table 2.1; 375 million tokens of warmup) for GPT-2 sizes and 125M, Pythia (arXiv 2304.01373, table 6; 1 % of
warmup) for 30M and 1B, Llama 2 (arXiv 2307.09288, section 2.2) for 7B. All of them have β₂ = 0.95, weight decay 0.1,
clipping at 1, and a cosine to a tenth. The published batch is that of four sites together, and a run sees 20 tokens per
parameter (Hoffmann et al., arXiv 2203.15556). Sizes below that are for trials, and keep the defaults.
"""

from pathlib import Path
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


DATA, RUN_TOML = Path("pier-data"), Path("run.toml")
"""The folder of a site, and the run that it founds, where no option names others."""
TOKENIZER = "tokenizer.json"
"""Of a model that reads tokens: a file beside run.toml, which people have to get."""
BESIDE = ("tokenizer_config.json", "chat_template.jinja")
"""Files beside a pretrained model's, with its special tokens and the form of chats: the founder's exports have them."""


def _recipe(
    lr: float, batch_size: int, micro_batch: int, warmup_steps: int, total_steps: int, tokenizer: str = TOKENIZER
) -> dict[str, dict[str, Any]]:
    # The more tokens a parameter gets, the more is gained if the rate falls to almost nothing: arXiv 2502.15938, and
    # docs/results.md, Convergence.
    rates = {"lr": lr, "min_lr": round(lr / 100, 9), "warmup_steps": warmup_steps, "beta2": 0.95}
    inner = {"total_steps": total_steps, "batch_size": batch_size, "micro_batch": micro_batch, **rates}
    return {"inner": inner, "data": {"tokenizer": tokenizer}}


RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "llama-30m": _recipe(1e-3, 64, 0, 44, 4_400, "bytes"),
    "llama-125m": _recipe(6e-4, 128, 8, 700, 4_200),
    "llama-1b": _recipe(3e-4, 256, 4, 75, 7_500),
    "llama-7b": _recipe(3e-4, 256, 1, 2_000, 32_000),
    "gpt2-small": _recipe(6e-4, 128, 8, 700, 4_800),
    "gpt2-medium": _recipe(3e-4, 128, 8, 700, 13_500),
    "gpt2-large": _recipe(2.5e-4, 128, 4, 700, 29_500),
    "gpt2-xl": _recipe(2e-4, 256, 4, 360, 29_700),
}
"""By preset, keys of run.toml by section."""
