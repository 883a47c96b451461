"""A run that starts from the weights of a model in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes.coordinated import Coordinated
from processes.run import CORPUS
from processes.site import PROGRAM, Site, wait_until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pier_node.trainer.model.hub import read_config

pytestmark = pytest.mark.processes


def made(kind: str, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(5)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=layers, n_head=4, n_positions=64))
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "qwen3":  # as most models are stored
        config = Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)
        return Qwen3ForCausalLM(config).bfloat16()
    return LlamaForCausalLM(LlamaConfig(**shape, rms_norm_eps=1e-5))


def tokenizer_of(folder: Path) -> bytes:
    """Give a model a tokenizer of its own: of bytes, with other ids than theirs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_bytes()


def pier_node(*words: object) -> str:
    done = subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.kill()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_two_sites_go_on_from_a_model_that_only_the_founder_has(tmp_path: Path, sites: list[Site], kind: str) -> None:
    before, run, out = made(kind), tmp_path / "run.toml", tmp_path / "out"
    before.save_pretrained(tmp_path / "model")
    ids, tokenizer = [*b"Pier"], b""
    if kind == "qwen3":
        tokenizer = tokenizer_of(tmp_path / "model")
        ids = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode("Pier").ids
    said = pier_node("init", run, "--from", tmp_path / "model")
    assert f"pier-node start --run {run} --from {tmp_path / 'model'}" in said
    text = run.read_text()
    wanted = {"sites": 2, "total_steps": 4, "lr": 1e-9, "min_lr": 1e-10, "weight_decay": 0.0, "batch_size": 2}
    for key, value in {**wanted, "context": 64, "inner_steps": 2, "start": '"none"'}.items():
        text = re.sub(rf"^#?{key} = .*$", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
    run.write_text(text)
    data = "--dataset", str(CORPUS), "--shared-data"
    first = Site(tmp_path / "a", "--run", str(run), "--from", str(tmp_path / "model"), *data)
    sites.append(first)
    first.start()
    wait_until("a token", lambda: (first.folder / "run.token").exists() or not first.running)
    second = Site(tmp_path / "b", "--peers", first.address, "--token-file", str(first.folder / "run.token"), *data)
    sites.append(second)
    second.start()
    for site in sites:
        assert site.ended() == 0, site.output
    assert first.digests() == second.digests()
    pier_node("export", out, "--data", second.folder)
    after = AutoModelForCausalLM.from_pretrained(out)
    assert type(after) is type(before)
    assert AutoTokenizer.from_pretrained(out)("Pier")["input_ids"] == ids
    if tokenizer:
        assert {(site.folder / "tokenizer.json").read_bytes() for site in sites} == {tokenizer}
        assert f"fetching the run's tokenizer.json from {first.name}" in second.output
    for name, tensor in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], tensor.float(), atol=1e-6, rtol=0, msg=name)
    measured = pier_node("evaluate", "--json", "--data", second.folder, *data[:2])
    assert 0 < json.loads(measured)["loss"] < 10
    assert "Pier" in pier_node("generate", "--data", second.folder, "--tokens", "3", "Pier")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_pipeline_goes_on_from_a_model_that_only_the_founder_has(
    tmp_path: Path, sites: list[Site], kind: str
) -> None:
    before, run, model, out = made(kind, layers=3), tmp_path / "run.toml", tmp_path / "model", tmp_path / "out"
    before.save_pretrained(model)
    pier_node("init", run, "--from", model)
    text = run.read_text()
    wanted = {"sites": 3, "total_steps": 6, "lr": 1e-9, "min_lr": 1e-10, "weight_decay": 0.0, "batch_size": 2}
    for key, value in {**wanted, "context": 64, "inner_steps": 2, "start": '"none"', "stages": 3}.items():
        text = re.sub(rf"^#?{key} = .*$", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
    run.write_text(text)
    data = "--dataset", str(CORPUS), "--shared-data"
    first = Site(tmp_path / "a", "--run", str(run), "--from", str(model), *data)
    sites.append(first)
    first.start()
    token = first.folder / "run.token"
    wait_until("a token", lambda: token.exists() or not first.running)
    for name in "bc":
        site = Site(tmp_path / name, "--peers", first.address, "--token-file", str(token), *data)
        sites.append(site)
        site.start()
    for site in sites:
        assert site.ended() == 0, site.output
    holder = next(site for site in sites if (site.folder / "checkpoints").exists())
    pier_node("export", out, "--data", holder.folder)
    after = AutoModelForCausalLM.from_pretrained(out)
    assert type(after) is type(before)
    for name, tensor in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], tensor.float(), atol=1e-6, rtol=0, msg=name)
    left_out = json.loads(pier_node("evaluate", "--json", "--skip", "0.3", "--data", holder.folder, *data[:2]))
    assert [it["stages"] for it in left_out["any"]] == [[1], [2]]


def _has_begun(site: Site) -> bool:
    return "Starting at round" in site.output or not site.running


def test_with_a_coordinator_the_first_site_brings_the_weights(tmp_path: Path) -> None:
    before, folder = made("llama"), tmp_path / "model"
    before.save_pretrained(folder)
    tokenizer = tokenizer_of(folder)
    tables: dict[str, dict[str, Any]] = {
        "model": {**read_config(folder).model_dump(exclude_none=True), "context": 64},
        "inner": {"total_steps": 4, "warmup_steps": 0, "lr": 1e-9, "min_lr": 0.0, "weight_decay": 0.0},
        "outer": {"start": "none", "inner_steps": 2},
        "data": {
            "tokenizer": str(folder / "tokenizer.json"),
            "tokenizer_hash": hashlib.sha256(tokenizer).hexdigest(),
        },
    }
    run = Coordinated(tmp_path, 2, "grpc", tables)
    try:
        run.start()
        (folder / "tokenizer.json").unlink()  # from now on the coordinator's copy is the only one
        for site in run.sites:
            site.command += ["--from", str(folder)]
            run.invite(site)
            site.start()
            wait_until("its place", partial(_has_begun, site))
        for site in run.sites:
            assert site.ended() == 0, site.output
        first, second = run.sites
        assert f"The run starts from the weights in {folder}." in first.output
        assert f"the weights in {folder} are not used" in second.output
        for site in run.sites:
            assert "fetching the run's tokenizer.json from the coordinator" in site.output
            assert (site.folder / "tokenizer.json").read_bytes() == tokenizer
        pier_node("export", tmp_path / "out", "--data", second.folder)
    finally:
        run.kill()
    after = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in before.state_dict().items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0, msg=name)


def test_the_weights_of_another_model_are_refused(tmp_path: Path, sites: list[Site]) -> None:
    made("llama").save_pretrained(tmp_path / "model")
    pier_node("init", tmp_path / "run.toml")
    site = Site(tmp_path / "a", "--run", str(tmp_path / "run.toml"), "--from", str(tmp_path / "model"))
    sites.append(site)
    site.start()
    assert site.ended() == 1
    assert "are of another model than [model] of the run: model." in site.output
    assert "pier-node init --from" in site.output


def test_only_a_founder_brings_weights(tmp_path: Path, sites: list[Site]) -> None:
    made("llama").save_pretrained(tmp_path / "model")
    pier_node("init", tmp_path / "run.toml", "--from", tmp_path / "model")
    options = (
        "--peers",
        "127.0.0.1:1",
        "--insecure",
        "--from",
        str(tmp_path / "model"),
        "--run",
        str(tmp_path / "run.toml"),
    )
    site = Site(tmp_path / "a", *options)
    sites.append(site)
    site.start()
    assert site.ended() == 1
    assert "--from is for the site that founds a run" in site.output
