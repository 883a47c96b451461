import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pier_node.base.errors import PierError
from pier_node.trainer.model.export import byte_tokenizer, write_tokenizer

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


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"nowhere\.json: no such tokenizer"):
        write_tokenizer(str(tmp_path / "nowhere.json"), tmp_path, context=8)
