"""Hugging Face's names and shapes for our parameters, both ways.

The llama form is `LlamaForCausalLM`, the gpt2 form `GPT2LMHeadModel`. GPT-2's linear layers (`Conv1D`) hold the
transpose of ours, with queries, keys and values fused into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pier_node.config import ModelSection


@dataclass(frozen=True)
class Rule:
    """One of their tensors: ours along the first dimension, one after the other, transposed or not."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from ours; it shares memory with ours where it can."""
        parts = [tensors[name] for name in self.ours]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.T.contiguous() if self.transposed else joined

    def split(self, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Ours from theirs, given our shapes. RuntimeError: the rows are not as many as ours together."""
        rows = [shapes[name][0] for name in self.ours]
        return dict(zip(self.ours, torch.split(tensor.T if self.transposed else tensor, rows)))


# Within a block, their name: ours.
_LLAMA_BLOCK = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.query.weight",
    "self_attn.k_proj.weight": "attention.key.weight",
    "self_attn.v_proj.weight": "attention.value.weight",
    "self_attn.o_proj.weight": "attention.output.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
_GPT2_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_GPT2_LINEARS = {
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.output",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}


def rules(config: ModelSection) -> Iterator[Rule]:
    """One rule for each of their tensors, from the embedding to the head; together they name each of ours once."""
    if config.form == "llama":
        yield Rule("model.embed_tokens.weight", ("embedding.weight",))
        for index in range(config.layers):
            yield from _llama_block(index)
        yield Rule("model.norm.weight", ("norm.weight",))
    else:
        yield Rule("transformer.wte.weight", ("embedding.weight",))
        yield Rule("transformer.wpe.weight", ("positions.weight",))
        for index in range(config.layers):
            yield from _gpt2_block(index)
        yield from (Rule(f"transformer.ln_f.{kind}", (f"norm.{kind}",)) for kind in ("weight", "bias"))
    if not config.tie_embeddings:
        yield Rule("lm_head.weight", ("head.weight",))


def _llama_block(index: int) -> Iterator[Rule]:
    for theirs, ours in _LLAMA_BLOCK.items():
        yield Rule(f"model.layers.{index}.{theirs}", (f"blocks.{index}.{ours}",))


def _gpt2_block(index: int) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        for theirs, norm in _GPT2_NORMS.items():
            yield Rule(f"transformer.h.{index}.{theirs}.{kind}", (f"blocks.{index}.{norm}.{kind}",))
        for theirs, linears in _GPT2_LINEARS.items():
            ours = tuple(f"blocks.{index}.{linear}.{kind}" for linear in linears)
            yield Rule(f"transformer.h.{index}.{theirs}.{kind}", ours, transposed=kind == "weight")
