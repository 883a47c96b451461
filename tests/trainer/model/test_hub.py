"""Models that Pier's own decoder does not know, made on the spot: transformers and Pier compute and write the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from trainer.hub_cases import KINDS, SHAPE, made, pretrained

from pier_node.base.errors import PierError
from pier_node.outer.layout import Layout
from pier_node.trainer.model import hub
from pier_node.trainer.model.hub import HubDecoder, export, filled_model, import_weights, read_config

CPU = torch.device("cpu")


@pytest.fixture
def tokens() -> Tensor:
    """[2, 25]."""
    return torch.randint(0, 61, (2, 25), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers(kind: str, tmp_path: Path, tokens: Tensor) -> None:
    theirs = made(kind, tmp_path)
    config, flat = import_weights(tmp_path)
    assert config.transformers
    assert config.transformers.kind == kind
    assert (config.context, config.vocab_size, config.layers) == (24, 61, 2)
    ours = filled_model(config, flat, CPU)
    assert isinstance(ours, HubDecoder)
    assert len(ours.blocks) == 2
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        logits = theirs(inputs).logits
    torch.testing.assert_close(ours(inputs), logits, rtol=0, atol=1e-5)
    wanted = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(ours(inputs, targets=targets), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_exported_with_the_config_that_came_in(kind: str, tmp_path: Path, tokens: Tensor) -> None:
    made(kind, tmp_path / "in", torch_dtype="bfloat16")
    config, flat = import_weights(tmp_path / "in")
    model = filled_model(config, flat.clone(), CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        optimizer.step()
    trained = torch.empty_like(flat)
    Layout.of(config).store(dict(model.named_parameters()), trained)
    assert not torch.equal(trained, flat)
    out = export(config, trained, tmp_path / "out", "bytes")
    with torch.no_grad():
        torch.testing.assert_close(pretrained(out)(tokens[:, :-1]).logits, model(tokens[:, :-1]), rtol=0, atol=1e-5)
    before, after = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("in", "out"))
    assert {**before, "dtype": "float32"} == {**after, "dtype": "float32"}
    again, flat = import_weights(out)
    assert again.transformers
    assert again == config.model_copy(update={"transformers": again.transformers})
    assert torch.equal(flat, trained)


def test_pier_reads_what_it_knows_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-5)).save_pretrained(tmp_path / "own")
    LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-6)).save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs").form == "transformers"
    monkeypatch.setattr(hub, "find_spec", lambda _name: None)
    assert read_config(tmp_path / "own").form == "llama"
    with pytest.raises(PierError, match="rms_norm_eps") as failed:
        read_config(tmp_path / "theirs")
    assert "pip install transformers" in failed.value.remedy
