"""A model as a GGUF file, read back by gguf's own reader and by transformers, which know llama.cpp's conventions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from trainer.model.conftest import CONFIGS

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.export import GGUF, byte_tokenizer, export
from pier_node.trainer.model.gguf import neighbours, write_gguf

gguf = pytest.importorskip("gguf", reason="scripts/install gguf: GGUF files are NOT tested")


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelSection:
    """With room for all bytes, and some ids that no token has."""
    return CONFIGS[request.param].model_copy(update={"vocab_size": 260})


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tensors(path: Path) -> dict[str, Tensor]:
    return {it.name: torch.from_numpy(it.data.copy()) for it in gguf.GGUFReader(path).tensors}


def byte_level(folder: Path, tokens: list[str], merges: list[tuple[str, str]], **how: Any) -> str:
    """A tokenizer.json of GPT-2's kind, with a token that ends texts."""
    library = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **how})
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(folder / "own.json"))
    return str(folder / "own.json")


def test_every_tensor_is_there_once_in_fp32(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    path = write_gguf(export(config, weights, tmp_path))
    found = tensors(path)
    assert sum(tensor.numel() for tensor in found.values()) == weights.numel()
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    everything = torch.cat([tensor.flatten() for tensor in found.values()])
    assert torch.equal(everything.sort().values, weights.sort().values)
    about = fields(path)
    form = config.form
    assert (about["general.architecture"], about["general.file_type"]) == (form, 0)
    assert about[f"{form}.block_count"] == config.layers
    assert about[f"{form}.context_length"] == config.context
    assert about[f"{form}.embedding_length"] == config.dim
    assert about[f"{form}.feed_forward_length"] == config.ffn_dim
    assert about[f"{form}.attention.head_count"] == config.heads


def test_transformers_computes_the_same_logits_from_the_file(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    write_gguf(export(config, weights, tmp_path))
    shape = AutoConfig.from_pretrained(tmp_path)  # of GPT-2 it does not read the whole shape from the file
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=GGUF, config=shape, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)


def test_rows_that_are_rotated_together_become_neighbours() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four
    assert neighbours(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_bytes_are_tokens_that_nothing_merges(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    about = fields(write_gguf(export(config, weights, tmp_path)))
    tokens = about["tokenizer.ggml.tokens"]
    assert len(tokens) == config.vocab_size
    alphabet = byte_tokenizer().get_vocab()
    assert tokens[:256] == sorted(alphabet, key=lambda token: alphabet[token])
    assert (about["tokenizer.ggml.model"], about["tokenizer.ggml.pre"]) == ("gpt2", "default")
    assert all("".join(merge.split()) not in alphabet for merge in about["tokenizer.ggml.merges"])
    assert about["tokenizer.ggml.eos_token_id"] == 0
    assert not about["tokenizer.ggml.add_bos_token"]


def test_a_tokenizer_of_gpt2s_kind_keeps_ids_merges_and_the_end(
    config: ModelSection, weights: Tensor, tmp_path: Path
) -> None:
    own = byte_level(tmp_path, ["a", "b", "ab"], [("a", "b")])
    path = write_gguf(export(config, weights, tmp_path / "out", own))
    about = fields(path)
    assert about["tokenizer.ggml.tokens"][:5] == ["a", "b", "ab", "<|endoftext|>", "[unused 4]"]
    assert about["tokenizer.ggml.token_type"][:5] == [1, 1, 1, 3, 5]
    assert about["tokenizer.ggml.merges"] == ["a b"]
    assert (about["tokenizer.ggml.pre"], about["tokenizer.ggml.eos_token_id"]) == ("gpt-2", 3)


def test_tokens_that_a_pretrained_model_lacks_are_left_out(
    config: ModelSection, weights: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [chr(0x100 + number) for number in range(config.vocab_size - 1)]
    own = Tokenizer.from_file(byte_level(tmp_path, tokens, []))
    own.add_special_tokens(["<image>"])
    own.save(str(tmp_path / "own.json"))
    path = write_gguf(export(config, weights, tmp_path / "out", str(tmp_path / "own.json")))
    assert fields(path)["tokenizer.ggml.tokens"] == [*tokens, "<|endoftext|>"]
    assert "the tokenizer has 261 tokens, the model 260" in caplog.text


def test_a_tokenizer_that_llama_cpp_would_split_otherwise_is_refused(
    config: ModelSection, weights: Tensor, tmp_path: Path
) -> None:
    own = byte_level(tmp_path, ["a", "b", "ab"], [("a", "b")], use_regex=False)
    folder = export(config, weights, tmp_path / "out", own)
    with pytest.raises(PierError, match="no rule of llama") as refused:
        write_gguf(folder)
    assert "convert_hf_to_gguf.py" in refused.value.remedy
    assert not (folder / GGUF).exists()


def test_a_tokenizer_of_another_kind_is_refused(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)).save(str(tmp_path / "own.json"))
    folder = export(config, weights, tmp_path / "out", str(tmp_path / "own.json"))
    with pytest.raises(PierError, match="no rule of llama"):
        write_gguf(folder)


def test_the_next_export_removes_the_file(config: ModelSection, weights: Tensor, tmp_path: Path) -> None:
    path = write_gguf(export(config, weights, tmp_path))
    assert path.name == GGUF
    export(config, weights, tmp_path)
    assert not path.exists()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == config.form
