"""Conversion to and from Hugging Face: names and shapes of parameters, and config.json for the [model] section.

The llama form is `LlamaForCausalLM`, the gpt2 form `GPT2LMHeadModel`. GPT-2's linear layers (`Conv1D`) are the
transpose of ours, with queries, keys and values fused into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.trainer.model.decoder import EPSILON


@dataclass(frozen=True)
class Rule:
    """One of their tensors: ours concatenated along the first dimension, optionally transposed."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from ours; it shares memory with ours if possible."""
        parts = [tensors[name] for name in self.ours]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.T.contiguous() if self.transposed else joined

    def split(self, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Ours from theirs, given our shapes. Raises RuntimeError: the number of rows does not match ours."""
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


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}

_KEYS: dict[str, dict[str, str]] = {
    "llama": {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_dim": "intermediate_size",
        "context": "max_position_embeddings",
        "rope_theta": "rope_theta",
        "tie_embeddings": "tie_word_embeddings",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn_dim": "n_inner",
        "context": "n_positions",
        "tie_embeddings": "tie_word_embeddings",
    },
}
"""By form, our key: theirs."""

_FIXED: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": EPSILON,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
}
"""Fixed properties of the decoder."""

# If left out, the ids would default to those of Llama's and GPT-2's own vocabularies, and text would end at an ordinary
# token.
_TEXT_ENDS = {"bos_token_id": None, "eos_token_id": None}

# GPT2Config's defaults are 0.1.
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def to_config(config: ModelSection) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": [_ARCHITECTURES[config.form]],
        "model_type": config.form,
        "torch_dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in _KEYS[config.form].items()},
        **_FIXED[config.form],
        **_TEXT_ENDS,
        **(_NO_DROPOUT if config.form == "gpt2" else {}),
    }


def from_config(content: Mapping[str, Any]) -> ModelSection:
    """The [model] section that a config.json describes.

    Raises:
        PierError: the model is of a kind, or has a feature, that the decoder lacks, or a key is missing.
    """
    form = content.get("model_type")
    if form not in _KEYS:
        raise PierError(f"config.json: model_type = {form!r} is unknown; known: {', '.join(_KEYS)}", _REMEDY)
    content = _filled_in(content)
    for key, value in _FIXED[form].items():
        if content.get(key, value) != value:
            raise PierError(f"config.json: {key} = {content[key]!r}; only {value!r} is known", _REMEDY)
    ours = {key: content.get(theirs) for key, theirs in _KEYS[form].items()}
    try:
        return ModelSection.model_validate({"form": form, **ours})
    except ValidationError as error:
        raise PierError(f"config.json: {_explain(error, form)}", _REMEDY) from error


def _filled_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that other versions of transformers write elsewhere, or leave out where they follow from others."""
    found = dict(content)
    rope = found.get("rope_parameters") or {}
    if rope:
        found.setdefault("rope_theta", rope.get("rope_theta"))
        found["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    heads, width, each = (found.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    if each and heads and width and each * heads != width:
        raise PierError(f"config.json: head_dim = {each}; only hidden_size / num_attention_heads is known", _REMEDY)
    if found.get("model_type") == "gpt2":
        wide = found.get("n_embd")
        if found.get("n_inner") is None and isinstance(wide, int):
            found["n_inner"] = 4 * wide
        found.setdefault("tie_word_embeddings", True)
    return found


_REMEDY = (
    "Pier's own trainer knows Llama and GPT-2 as `pier-node export` writes them. Train any other model by a program of "
    "your own: docs/program.md."
)


def _explain(error: ValidationError, form: str) -> str:
    problems = [(".".join(_KEYS[form][str(key)] for key in each["loc"]), each) for each in error.errors()]
    return "; ".join(f"{key} = {each['input']!r}: {each['msg']}" if key else each["msg"] for key, each in problems)
