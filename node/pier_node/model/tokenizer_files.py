"""The tokenizer's part of an exported model: tokenizer.json and tokenizer_config.json, for `AutoTokenizer`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pier_node.errors import PierError


def write_tokenizer(tokenizer: str, folder: Path, context: int) -> None:
    """Write both files.

    Args:
        tokenizer: `bytes`, or the path of the tokenizer.json that the model was trained with.
        folder: where config.json lies.
        context: the longest text in tokens that the model takes.

    Raises:
        PierError: the tokenizer.json is not there.
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
    """A tokenizer whose token ids are the values of the text's UTF-8 bytes: byte-level BPE without a merge."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    # GPT-2's alphabet: a printable Latin-1 byte is its own character, the others are those from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise PierError(f"{source}: no such tokenizer", "Name the tokenizer.json that the run was trained with.")
    shutil.copyfile(source, target)
