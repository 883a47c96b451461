"""A trained model and its tokenizer as a folder in Hugging Face's layout, written and read back.

config.json is written last and removed first, so a folder that has one is complete. The mark is written first: a folder
that has one contains only what Pier put there, and may be overwritten. `AutoTokenizer` reads tokenizer.json and
tokenizer_config.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.huggingface import Rule, from_config, rules, to_config


def write_tokenizer(tokenizer: str, folder: Path, context: int) -> None:
    """Write the tokenizer's two files.

    Args:
        tokenizer: `bytes`, or the path of the tokenizer.json that the model was trained with.
        folder: the folder of config.json.
        context: maximum length of a text for the model, in tokens.

    Raises:
        PierError: the tokenizer.json does not exist.
    """
    if tokenizer == "bytes":
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    else:
        _copy(Path(tokenizer), folder / "tokenizer.json")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token ids are the values of the text's UTF-8 bytes: byte-level BPE without merges."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    # GPT-2's alphabet: a printable Latin-1 byte is its own character; the others are those from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise PierError(f"{source}: no such tokenizer", "Name the tokenizer.json that the run was trained with.")
    shutil.copyfile(source, target)


SHARD_BYTES = 5_000_000_000

INDEX = "model.safetensors.index.json"
MARK = ".pier-export"
_MARK_TEXT = "Pier wrote this model. `pier-node export` replaces it when it is given this folder again.\n"


def export(
    config: ModelSection, weights: Tensor, folder: Path, tokenizer: str = "bytes", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights as `LlamaForCausalLM` or `GPT2LMHeadModel`, with a tokenizer, for `from_pretrained`.

    Args:
        config: the [model] section.
        weights: flat, shape [Layout.length].
        folder: created if needed; any model in it is replaced. `is_ours` tells whether it may be.
        tokenizer: as in the [data] section: `bytes`, or the path of a tokenizer.json.
        shard_bytes: larger weights are split into files of at most this size in bytes, with an index.

    Returns:
        The folder.

    Raises:
        PierError: the folder cannot be written, or the tokenizer.json does not exist.
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
    """Whether an export may replace the content of a folder: nothing, or an earlier export."""
    return not folder.exists() or (folder / MARK).exists() or not any(folder.iterdir())


def import_weights(folder: Path) -> tuple[ModelSection, Tensor]:
    """Read an export back: the [model] section, and the flat fp32 weights, shape [Layout.length].

    Raises:
        PierError: it is not an export, it is damaged, or the decoder lacks a feature of its model.
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
        # safetensors creates files for their owner only, whatever the umask allows.
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
