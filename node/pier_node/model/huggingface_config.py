"""Hugging Face's config.json for our [model] section, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pier_node.config import ModelSection
from pier_node.errors import PierError
from pier_node.model.decoder import EPSILON

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
"""What the decoder does, and cannot do otherwise."""

# Left out, the ids would be those of Llama's and GPT-2's own vocabularies: text would end at an ordinary token.
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
        PierError: the model is of a kind, or has a feature, that the decoder does not have, or a key is missing.
    """
    form = content.get("model_type")
    if form not in _KEYS:
        raise PierError(f"config.json: model_type = {form!r} is unknown; known: {', '.join(_KEYS)}", _REMEDY)
    for key, value in _FIXED[form].items():
        if content.get(key, value) != value:
            raise PierError(f"config.json: {key} = {content[key]!r}; only {value!r} is known", _REMEDY)
    ours = {key: content.get(theirs) for key, theirs in _KEYS[form].items()}
    try:
        return ModelSection.model_validate({"form": form, **ours})
    except ValidationError as error:
        raise PierError(f"config.json: {_explain(error, form)}", _REMEDY) from error


_REMEDY = "Only what `pier-node export` wrote can be read."


def _explain(error: ValidationError, form: str) -> str:
    problems = [(".".join(_KEYS[form][str(key)] for key in each["loc"]), each) for each in error.errors()]
    return "; ".join(f"{key} = {each['input']!r}: {each['msg']}" if key else each["msg"] for key, each in problems)
