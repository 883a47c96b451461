from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.presets import PRESETS
from pier_node.config.run import ModelSection
from pier_node.experts.serving.decoding import Reader
from pier_node.experts.serving.models import OwnReader
from pier_node.outer.layout import Layout
from pier_node.trainer.model import export as module
from pier_node.trainer.model.decoder import Decoder, stream
from pier_node.trainer.model.export import (
    INDEX,
    MARK,
    Rule,
    byte_tokenizer,
    export,
    from_config,
    import_weights,
    rules,
    to_config,
    write_tokenizer,
)

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


def test_blocks_that_write_to_a_subspace_are_exported_as_an_ordinary_model(tmp_path: Path) -> None:
    config = ModelSection(dim=32, vocab_size=61, ffn_dim=48, context=24, tie_embeddings=False, subspace=8)
    weights = torch.randn(Layout.of(config).length, generator=torch.Generator().manual_seed(3)) * 0.3
    model, tokens = Decoder(config), torch.arange(20)[None]
    Layout.of(config).load(model, weights)
    ours = model(tokens)
    stream = model.through(model.embed(tokens))
    assert torch.equal(stream[..., 8:], model.embed(tokens)[..., 8:])
    assert not torch.isclose(stream[..., :8], model.embed(tokens)[..., :8]).any()
    export(config, weights, tmp_path)
    torch.testing.assert_close(transformers_logits(tmp_path, tokens), ours, rtol=0, atol=1e-5)
    plain, flat = import_weights(tmp_path)
    assert plain.subspace == 0
    again = Decoder(plain)
    Layout.of(plain).load(again, flat)
    torch.testing.assert_close(again(tokens), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, SHARD])
def test_an_export_read_back_has_the_same_bits(
    config: ModelSection, weights: Tensor, tmp_path: Path, shard_bytes: int
) -> None:
    folder = export(config, weights, tmp_path / "new" / "folder", shard_bytes=shard_bytes)
    again, flat = import_weights(folder)
    assert again.model_dump(exclude={"preset"}) == config.model_dump(exclude={"preset"})
    assert torch.equal(flat.view(torch.int32), weights.view(torch.int32))


def test_names_and_buffers_of_other_programs_are_known(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    """GPT-2 on the hub is without a prefix, and older files have what follows from config.json."""
    from safetensors.torch import load_file, save_file

    file = export(config, weights, tmp_path) / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors |= {name: torch.ones(1) for name in ("h.0.attn.bias", "model.layers.0.self_attn.rotary_emb.inv_freq")}
    if config.tie_embeddings:
        tensors["lm_head.weight"] = torch.ones(1)
    save_file(tensors, file)
    assert torch.equal(import_weights(tmp_path)[1], weights)


def test_transformers_trains_the_same_model(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor, tmp_path: Path
) -> None:
    """In training mode too: GPT-2's default there is to drop a tenth of its activations."""
    other = from_pretrained(export(config, weights, tmp_path)).train()
    torch.testing.assert_close(other(tokens).logits, model(tokens), rtol=0, atol=1e-5)


def test_transformers_generates_as_we_do(config: ModelSection, weights: Tensor, model: Decoder, tmp_path: Path) -> None:
    other = from_pretrained(export(config, weights, tmp_path))
    theirs = other.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)
    assert theirs[0, 3:].tolist() == list(stream(model, [5, 6, 7], 12, temperature=0.0))


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


def test_a_damaged_tokenizer_leaves_the_earlier_export_whole(
    config: ModelSection, weights: Tensor, tmp_path: Path
) -> None:
    export(config, weights, tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(PierError, match=r"broken\.json: not a tokenizer"):
        export(config, weights, tmp_path, tokenizer=str(tmp_path / "broken.json"))
    assert torch.equal(import_weights(tmp_path)[1], weights)


def test_no_config_is_left_beside_the_tokenizer_of_another_export(
    config: ModelSection, weights: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(config, weights, tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_tokenizer", killed)
    with pytest.raises(KeyboardInterrupt):
        export(config, weights, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_model_is_replaced_by_one_with_the_tokenizer_that_is_there(
    config: ModelSection, weights: Tensor, tmp_path: Path
) -> None:
    export(config, torch.zeros_like(weights), tmp_path)
    export(config, weights, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    assert torch.equal(import_weights(tmp_path)[1], weights)


def test_a_folder_that_cannot_be_written_is_named(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PierError, match="file/out: cannot export"):
        export(config, weights, tmp_path / "file" / "out")


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_config_is_no_export(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(PierError, match=r"config\.json: no model in Hugging Face's format: [^'\"]*\n"):
        import_weights(tmp_path)


@pytest.mark.parametrize("key", ["rope_parameters", "model_type", "head_dim", "num_hidden_layers"])
@pytest.mark.parametrize("value", [[1], math.inf, math.nan, 1e300, {"a": []}, "x"])
def test_a_config_of_nonsense_is_refused_in_words(key: str, value: Any) -> None:
    config = {name: it for name, it in to_config(ModelSection()).items() if name != "rope_theta"}
    with pytest.raises(PierError, match=r"config\.json: "):
        from_config({**config, key: value})


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


def test_the_rules_name_every_parameter_once(config: ModelSection) -> None:
    ours = [name for rule in rules(config) for name in rule.ours]
    assert sorted(ours) == sorted(entry.name for entry in Layout.of(config).entries)
    theirs = [rule.theirs for rule in rules(config)]
    assert len(set(theirs)) == len(theirs)


def test_splitting_what_was_joined_gives_the_same_tensors(config: ModelSection, weights: Tensor) -> None:
    layout = Layout.of(config)
    shapes = {entry.name: entry.shape for entry in layout.entries}
    back = torch.zeros_like(weights)
    for rule in rules(config):
        layout.store(rule.split(rule.join(layout.views(weights)), shapes), back)
    assert torch.equal(back, weights)


def test_fused_and_transposed() -> None:
    """c_attn of a Conv1D: rows are inputs, columns are queries, then keys, then values."""
    rule = Rule("c_attn", ("q", "k", "v"), transposed=True)
    tensors = {name: torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + ten for name, ten in (("q", 0), ("k", 10), ("v", 20))}
    fused = rule.join(tensors)
    assert fused.tolist() == [[1, 3, 11, 13, 21, 23], [2, 4, 12, 14, 22, 24]]
    assert fused.is_contiguous()


def test_too_few_rows_are_refused() -> None:
    rule = Rule("c_attn.bias", ("q", "k"))
    with pytest.raises(RuntimeError, match="split"):
        rule.split(torch.zeros(3), {"q": (2,), "k": (2,)})


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


TOKENIZER = byte_tokenizer()

AWKWARD = "Hello,  naïve Ünïcode\r\n\t don 't 漢字 🎉 \x00\x7f\xa0 end . "


@given(st.text())
def test_token_ids_are_the_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_byte_has_a_token() -> None:
    assert TOKENIZER.get_vocab_size() == 256
    assert TOKENIZER.decode([0xC3, 0xA9]) == "é"
    assert TOKENIZER.decode([0xFF]) == "�"


def test_transformers_reads_it_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer("bytes", tmp_path, context=77)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(AWKWARD)["input_ids"]
    assert ids == list(AWKWARD.encode())
    assert tokenizer.decode(ids) == AWKWARD
    assert tokenizer.model_max_length == 77


def test_a_tokenizer_of_ones_own_is_copied(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    TOKENIZER.save(str(own))
    target = tmp_path / "out"
    target.mkdir()
    write_tokenizer(str(own), target, context=8)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("ab").ids == [97, 98]
    assert json.loads((target / "tokenizer_config.json").read_text())["model_max_length"] == 8


@pytest.mark.parametrize("as_file", [False, True])
def test_the_chat_template_and_the_end_of_a_text_are_kept(tmp_path: Path, as_file: bool) -> None:
    from transformers import AutoTokenizer

    library = byte_tokenizer()
    library.add_special_tokens(["<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    about = {
        "chat_template": "old",
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "[PAD]",
        "model_max_length": 9,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    if as_file:
        (tmp_path / "chat_template.jinja").write_text("new")
    target = tmp_path / "model"
    target.mkdir()
    assert write_tokenizer(str(tmp_path / "tokenizer.json"), target, 8) == {"eos_token_id": 256}
    loaded = AutoTokenizer.from_pretrained(target)
    assert loaded.chat_template == ("new" if as_file else "old")
    assert (loaded.eos_token_id, loaded.pad_token, len(loaded)) == (256, None, 257)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"nowhere\.json: no such tokenizer"):
        write_tokenizer(str(tmp_path / "nowhere.json"), tmp_path, context=8)


@torch.no_grad()
def predicted(model: Decoder, tokens: list[int]) -> Tensor:
    """log p of what follows each token, [tokens, vocab], in one forward pass."""
    return torch.log_softmax(model(torch.tensor([tokens]))[0], dim=-1)


def test_what_it_gives_is_what_one_forward_pass_gives(model: Decoder, tokens: Tensor) -> None:
    text, reader = tokens[0].tolist(), Reader()
    given = torch.cat([reader.read(OwnReader(model), part) for part in (text[:5], text[5:6], text[6:])])
    logs = predicted(model, text)
    assert given[0] == 0
    torch.testing.assert_close(given[1:], logs[:-1].gather(1, tokens[0, 1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    assert reader.next is not None
    torch.testing.assert_close(reader.next, logs[-1], rtol=1e-4, atol=1e-4)


def test_a_text_longer_than_the_context_is_predicted_from_its_newer_half(model: Decoder, tokens: Tensor) -> None:
    text, reader = tokens.flatten().tolist(), Reader()
    reader.read(OwnReader(model), text[:24])
    given = reader.read(OwnReader(model), text[24:])
    first = predicted(model, text[:24])[-1, text[24]]
    later = predicted(model, text[12:36])  # tokens 12-23 are read again when the window is full
    torch.testing.assert_close(given[0], first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given[5], later[16, text[29]], rtol=1e-4, atol=1e-4)
    assert reader.next is not None
    torch.testing.assert_close(reader.next, predicted(model, text[24:48])[-1], rtol=1e-4, atol=1e-4)


def test_one_by_one_a_long_text_gets_the_same(model: Decoder, tokens: Tensor) -> None:
    text = [*tokens.flatten().tolist(), 1, 2, 3]
    together, alone = Reader(), Reader()
    given = torch.cat([alone.read(OwnReader(model), [token]) for token in text])
    torch.testing.assert_close(given, together.read(OwnReader(model), text), rtol=1e-4, atol=1e-4)


def test_no_tokens_change_nothing(model: Decoder) -> None:
    reader = Reader()
    assert len(reader.read(OwnReader(model), [])) == 0
    assert reader.next is None
