from typing import Any

import pytest

from pier_node.base.errors import PierError
from pier_node.config.presets import PRESETS
from pier_node.config.run import ModelSection
from pier_node.trainer.model.huggingface import from_config, to_config


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back(preset: str) -> None:
    config = ModelSection(preset=preset)
    assert from_config(to_config(config)).model_dump(exclude={"preset"}) == config.model_dump(exclude={"preset"})


def test_seven_billion_reads_as_llama_2_does() -> None:
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    content = to_config(ModelSection(preset="llama-7b"))
    assert {key: content[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("llama-tiny", {"model_type": "mamba"}, "model_type = 'mamba' is unknown; known: llama, gpt2"),
        ("llama-tiny", {"attention_bias": True}, "attention_bias = True; only False"),
        ("llama-tiny", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ("llama-tiny", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ("llama-tiny", {"rope_theta": None}, "rope_theta = None"),
        ("llama-tiny", {"num_key_value_heads": 3}, "must be a multiple of kv_heads = 3"),
        ("gpt2-1m", {"activation_function": "relu"}, "only 'gelu_new'"),
        ("gpt2-1m", {"n_inner": None, "n_embd": "wide"}, r"n_embd = 'wide'.*n_inner = None"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(preset: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(PierError, match=message) as refusal:
        from_config({**to_config(ModelSection(preset=preset)), **change})
    assert "pier-node export" in refusal.value.remedy
