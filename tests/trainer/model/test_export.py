import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.export import INDEX, MARK, export, import_weights
from pier_node.trainer.model.generate import generate

SHARD = 9_000
"""Bytes: some ten shards of the small models."""


def from_pretrained(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **more)


def transformers_logits(folder: Path, tokens: Tensor) -> Any:
    model, report = from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, SHARD])
def test_transformers_computes_the_same_logits(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor, tmp_path: Path, shard_bytes: int
) -> None:
    export(config, weights, tmp_path, shard_bytes=shard_bytes)
    ours = model(tokens)
    assert ours.std() > 0.3
    torch.testing.assert_close(transformers_logits(tmp_path, tokens), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, SHARD])
def test_an_export_read_back_has_the_same_bits(
    config: ModelSection, weights: Tensor, tmp_path: Path, shard_bytes: int
) -> None:
    folder = export(config, weights, tmp_path / "new" / "folder", shard_bytes=shard_bytes)
    again, flat = import_weights(folder)
    assert again.model_dump(exclude={"preset"}) == config.model_dump(exclude={"preset"})
    assert torch.equal(flat.view(torch.int32), weights.view(torch.int32))


def test_transformers_trains_the_same_model(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor, tmp_path: Path
) -> None:
    """In training mode too: GPT-2's default there is to drop a tenth of its activations."""
    other = from_pretrained(export(config, weights, tmp_path)).train()
    torch.testing.assert_close(other(tokens).logits, model(tokens), rtol=0, atol=1e-5)


def test_transformers_generates_as_we_do(config: ModelSection, weights: Tensor, model: Decoder, tmp_path: Path) -> None:
    other = from_pretrained(export(config, weights, tmp_path))
    theirs = other.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)
    assert theirs[0, 3:].tolist() == generate(model, [5, 6, 7], 12, temperature=0.0)


def test_shards_are_within_their_size_and_the_index_names_every_tensor(
    config: ModelSection, weights: Tensor, tmp_path: Path
) -> None:
    export(config, weights, tmp_path, shard_bytes=SHARD)
    index = json.loads((tmp_path / INDEX).read_text())
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(shards) > 2
    assert index["weight_map"] == {name: shard for shard, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == weights.nbytes
    for tensors in shards.values():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= SHARD or len(tensors) == 1


@pytest.mark.parametrize("first", [5_000_000_000, SHARD])
def test_an_earlier_export_in_the_folder_is_replaced_and_other_files_stay(tmp_path: Path, first: int) -> None:
    config = ModelSection(preset="llama-tiny")
    weights = torch.randn(Layout.of(config).length)
    (tmp_path / "model-notes.safetensors").write_text("mine")
    export(config, torch.zeros_like(weights), tmp_path, shard_bytes=first)
    export(config, weights, tmp_path, shard_bytes=5_000_000_000 if first == SHARD else SHARD)
    assert torch.equal(import_weights(tmp_path)[1], weights)
    assert (tmp_path / INDEX).exists() == (not (tmp_path / "model.safetensors").exists())
    assert (tmp_path / "model-notes.safetensors").read_text() == "mine"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_are_for_whom_the_umask_allows(tmp_path: Path, umask: int, mode: int) -> None:
    config = ModelSection(preset="llama-tiny")
    before = os.umask(umask)
    try:
        export(config, torch.zeros(Layout.of(config).length), tmp_path)
    finally:
        os.umask(before)
    names = {MARK, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert found == dict.fromkeys(names, mode)


def test_a_missing_tokenizer_leaves_the_earlier_export_whole(
    config: ModelSection, weights: Tensor, tmp_path: Path
) -> None:
    export(config, weights, tmp_path)
    with pytest.raises(PierError, match="no such tokenizer"):
        export(config, weights, tmp_path, tokenizer=str(tmp_path / "gone.json"))
    assert torch.equal(import_weights(tmp_path)[1], weights)


def test_a_folder_that_cannot_be_written_is_named(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PierError, match="file/out: cannot export"):
        export(config, weights, tmp_path / "file" / "out")


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_config_is_no_export(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(PierError, match=r"config\.json: not an exported model"):
        import_weights(tmp_path)


def damage(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(("ln_f.weight", "model.norm.weight")))
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "gone":
        file.unlink()
    else:
        norm = tensors.pop(name)
        wrong = {"lost": {}, "short": {name: norm[:31]}, "more": {name: norm, "lm_head.extra": norm.clone()}}
        save_file({**tensors, **wrong[how]}, file)


@pytest.mark.parametrize(
    ("how", "message"),
    [("cut", "do not fit"), ("gone", "do not fit"), ("short", "do not fit"), ("more", "extra"), ("lost", "no weights")],
)
def test_damaged_weights_are_refused(
    config: ModelSection, weights: Tensor, tmp_path: Path, how: str, message: str
) -> None:
    export(config, weights, tmp_path)
    damage(tmp_path, how)
    with pytest.raises(PierError, match=message) as refusal:
        import_weights(tmp_path)
    assert "pier-node export" in refusal.value.remedy
