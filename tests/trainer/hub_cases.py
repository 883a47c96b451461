"""Tiny models of families that Pier's own decoder does not know, made on the spot."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

transformers: Any = import_module("transformers")
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LARGE_HEADS = {"head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {**LARGE_HEADS, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 8, "tie_word_embeddings": False},
    "gemma": LARGE_HEADS,
    "gemma2": {**LARGE_HEADS, "sliding_window": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {**LARGE_HEADS, "sliding_window": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {"tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


def made(kind: str, folder: Path, **more: Any) -> Any:
    """A model with random weights in a folder, as transformers writes it."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **{**SHAPE, **KINDS[kind], **more})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def pretrained(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model
