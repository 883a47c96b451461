"""[model.transformers]: what of it comes from the network is bounded, is data alone, and is part of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pier_node.base.errors import PierError
from pier_node.config import pretrained
from pier_node.config.commented import run_toml
from pier_node.config.pretrained import CONFIG, NAMES, TransformersSection, plain
from pier_node.config.run import RunConfig, from_canonical, load
from pier_node.outer.layout import Layout

TENSORS = ("model.embed_tokens.weight 61x32", "model.norm.weight 32")
CONTENT = {"model_type": "qwen3", "hidden_size": 32, "rope_parameters": {"rope_theta": 1e6}}


def tables(content: Any = CONTENT, **sections: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content)
    model = {"form": "transformers", "vocab_size": 61, "dim": 32, "layers": 2, "heads": 5, "context": 24}
    return {"model": {**model, "transformers": {"config": text, "tensors": TENSORS}}, **sections}


def test_it_travels_and_is_written_with_the_run(tmp_path: Path) -> None:
    config = RunConfig.model_validate(tables())
    assert from_canonical(config.canonical()).hash() == config.hash()
    (tmp_path / "run.toml").write_text(run_toml(tables()))
    assert load(tmp_path / "run.toml") == config
    other = RunConfig.model_validate(tables({**CONTENT, "hidden_act": "gelu"}))
    assert other.hash() != config.hash()
    assert [(entry.name, entry.shape) for entry in Layout.of(config.model).entries] == [
        ("model.embed_tokens.weight", (61, 32)),
        ("model.norm.weight", (32,)),
    ]
    assert config.model.name == "qwen3"


def test_a_run_without_it_says_nothing_of_it() -> None:
    assert "transformers" not in RunConfig().canonical().replace('"form":"llama"', "")
    assert "\n[model.transformers]" not in run_toml()
    with pytest.raises(ValidationError, match="need each other"):
        RunConfig.model_validate({"model": {"form": "transformers"}})
    with pytest.raises(ValidationError, match="need each other"):
        RunConfig.model_validate({"model": {**tables()["model"], "form": "llama"}})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ("[]", "no object"),
        ({"hidden_size": 32}, "no object"),
        ({**CONTENT, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map is not allowed"),
        ({**CONTENT, "quantization_config": {}}, "quantization_config is not allowed"),
        ({**CONTENT, "_attn_implementation": "someone/kernel"}, "_attn_implementation is not allowed"),
        ({**CONTENT, "text_config": {"experts_implementation": "x/y"}}, "experts_implementation is not allowed"),
        ({**CONTENT, "hidden_size": 10**12}, "too large"),
        ({**CONTENT, "num_labels": 10**6}, "num_labels is not allowed"),
        ({**CONTENT, "_auto_class": "AutoConfig"}, "_auto_class is not allowed"),
        ({**CONTENT, "text_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers is 1000000; at most 4096"),
        ({**CONTENT, "num_experts": 10**6}, "num_experts is 1000000; at most 4096"),
        ('{"model_type": "qwen3", "a": NaN}', "too large"),
        ('{"model_type": "qwen3", "a": ' + "[" * 20 + "]" * 20 + "}", "more than 8"),
        ({**CONTENT, "x": "y" * CONFIG}, "at most"),
    ],
)
def test_what_is_no_plain_description_is_refused(content: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(tables(content))


def test_the_names_of_its_tensors_fit_where_the_trainer_gets_them() -> None:
    long = tuple(f"{'x' * 200}.{number} 3x4" for number in range(NAMES // 200))
    with pytest.raises(ValidationError, match="characters"):
        TransformersSection(config=json.dumps(CONTENT), tensors=long)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"inner": {"optimizer": "muon"}}, "muon"),
        ({"data": {"tokenizer": "t.json", "document_mask": True}}, "document_mask"),
        ({"inner": {"residual_stream": "bf16"}}, "residual_stream"),
    ],
)
def test_what_needs_piers_own_decoder_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=rf"{words}.*Pier's own decoder"):
        RunConfig.model_validate(tables(**sections))


def test_a_pipeline_divides_a_model_whose_parameters_number_its_blocks() -> None:
    pipeline: dict[str, Any] = {"pipeline": {"stages": 2}, "run": {"sites": 2}}
    with pytest.raises(ValidationError, match="not numbered by its blocks"):
        RunConfig.model_validate(tables(**pipeline))
    content = tables(**pipeline)
    content["model"]["transformers"]["tensors"] = (*TENSORS, *(f"model.layers.{k}.norm.weight 32" for k in range(2)))
    assert RunConfig.model_validate(content).begins_pretrained


def test_a_run_keeps_all_but_places_and_code() -> None:
    given = {**CONTENT, "_name_or_path": "/home/me", "auto_map": {}, "_sliding_window_pattern": 6}
    given["text_config"] = {"_attn_implementation_autoset": True, "head_dim": 8}
    assert plain(given) == {**CONTENT, "_sliding_window_pattern": 6, "text_config": {"head_dim": 8}}


def test_a_site_without_the_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    section = RunConfig.model_validate(tables()).model.transformers
    assert section
    section.require_library()
    monkeypatch.setattr(pretrained, "find_spec", lambda _name: None)
    with pytest.raises(PierError, match="qwen3") as failed:
        section.require_library()
    assert "pip install transformers" in failed.value.remedy
