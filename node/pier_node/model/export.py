"""A trained model as a folder in Hugging Face's layout, written and read back.

config.json is written last and taken away first: a folder that has one is whole. The mark is written first: a folder
that has one holds nothing but what Pier put there, and may be written over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pier_node.config import ModelSection
from pier_node.errors import PierError
from pier_node.model.huggingface import Rule, rules
from pier_node.model.huggingface_config import from_config, to_config
from pier_node.model.layout import Layout
from pier_node.model.tokenizer_files import write_tokenizer

SHARD_BYTES = 5_000_000_000

INDEX = "model.safetensors.index.json"
MARK = ".pier-export"
_MARK_TEXT = "Pier wrote this model. `pier-node export` replaces it when it is given this folder again.\n"


def export(
    config: ModelSection, weights: Tensor, folder: Path, tokenizer: str = "bytes", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights as `LlamaForCausalLM` or `GPT2LMHeadModel`, with a tokenizer, so that `from_pretrained` takes it.

    Args:
        config: the [model] section.
        weights: flat, shape [Layout.length].
        folder: made if need be; whatever model is in it is replaced. `is_ours` tells whose it is.
        tokenizer: as in the [data] section: `bytes`, or the path of a tokenizer.json.
        shard_bytes: weights above this are split into files of at most this size, with an index.

    Returns:
        The folder.

    Raises:
        PierError: the folder cannot be written, or the tokenizer.json is not there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(_MARK_TEXT)
        write_tokenizer(tokenizer, folder, config.context)
        _clear(folder)
        _write_weights(list(rules(config)), Layout.of(config).views(weights), folder, shard_bytes)
        (folder / "config.json").write_text(json.dumps(to_config(config), indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise PierError(
            f"{folder}: cannot export: {error}", "Choose a folder that has room and can be written."
        ) from error
    return folder


def is_ours(folder: Path) -> bool:
    """Whether an export may replace what is in a folder: nothing, or an earlier export."""
    return not folder.exists() or (folder / MARK).exists() or not any(folder.iterdir())


def import_weights(folder: Path) -> tuple[ModelSection, Tensor]:
    """Read an export back: the [model] section, and the flat fp32 weights, shape [Layout.length].

    Raises:
        PierError: it is not an export, it was damaged, or the decoder does not have a feature of its model.
    """
    config = read_config(folder)
    layout = Layout.of(config)
    flat = torch.empty(layout.length)
    shapes = {entry.name: entry.shape for entry in layout.entries}
    wanted = {rule.theirs: rule for rule in rules(config)}
    try:
        for name, tensor in _stored(folder):
            layout.store(wanted.pop(name).split(tensor, shapes), flat)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise PierError(f"{folder}: the weights do not fit config.json: {error}", _AGAIN) from error
    if wanted:
        raise PierError(f"{folder}: no weights for {', '.join(wanted)}", _AGAIN)
    return config, flat


def read_config(folder: Path) -> ModelSection:
    """The [model] section of an export. Raises PierError: as `import_weights` does."""
    return from_config(_read_json(folder / "config.json"))


_AGAIN = "Write the folder again with: pier-node export"


def _clear(folder: Path) -> None:
    for name in ("config.json", INDEX, "model.safetensors", "model-?????-of-?????.safetensors"):
        for old in folder.glob(name):
            old.unlink()


def _write_weights(all_rules: list[Rule], tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    shards = list(_shards(all_rules, tensors, shard_bytes))
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file({rule.theirs: rule.join(tensors) for rule in shard}, folder / name, metadata={"format": "pt"})
        # safetensors makes files for their owner alone, whatever the umask allows.
        (folder / name).chmod((folder / MARK).stat().st_mode)
        places.update({rule.theirs: name for rule in shard})
    if len(shards) > 1:
        size = sum(_size(rule, tensors) for rule in all_rules)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(all_rules: list[Rule], tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[Rule]]:
    shard: list[Rule] = []
    used = 0
    for rule in all_rules:
        size = _size(rule, tensors)
        if shard and used + size > shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append(rule)
        used += size
    yield shard


def _size(rule: Rule, tensors: Mapping[str, Tensor]) -> int:
    return sum(tensors[name].nbytes for name in rule.ours)


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    index = folder / INDEX
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            yield from ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise PierError(f"{path}: not an exported model: {error}", "Write one with: pier-node export") from error
