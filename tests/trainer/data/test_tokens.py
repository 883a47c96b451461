from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection
from pier_node.trainer.data.tokens import (
    BROKEN,
    ByteTokenizer,
    FileTokenizer,
    Spelling,
    check_vocab,
    document_separator,
    open_tokenizer,
)

TEXT = "the pier reaches out into the sea, and the sea reaches the pier. é 🙂\n"


def train_tokenizer(path: Path, special: list[str]) -> Path:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([TEXT] * 10, trainer)
    library.save(str(path))
    return path


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text_read_as_replacement() -> None:
    assert ByteTokenizer().decode([72, 0xC3, 105, 300]) == "H\ufffdi\ufffd"


def test_bytes_have_256_ids_and_a_newline_between_documents() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 10)


def test_a_tokenizer_file_comes_back(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = open_tokenizer(str(path))
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint32
    assert len(ids) < len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == len(Library.from_file(str(path)).get_vocab())
    assert tokenizer.separator == 0


def test_no_special_token_is_added_and_separators_do_not_show(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "t.json", ["<pad>", "</s>"])
    library = Library.from_file(str(path))
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.save(str(path))
    tokenizer = open_tokenizer(str(path))
    assert tokenizer.separator == 1
    assert 1 not in tokenizer.encode(TEXT)
    assert tokenizer.decode([*tokenizer.encode(TEXT), 1]) == TEXT


def test_a_tokenizer_that_was_saved_while_it_cut_texts_does_not(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "t.json", ["<pad>"])
    whole = open_tokenizer(str(path)).encode(TEXT)
    library = Library.from_file(str(path))
    library.enable_truncation(2)
    library.enable_padding(length=64)
    library.save(str(path))
    assert open_tokenizer(str(path)).encode(TEXT).tolist() == whole.tolist()


def test_a_tokenizer_without_an_end_has_no_separator(tmp_path: Path) -> None:
    assert FileTokenizer(train_tokenizer(tmp_path / "t.json", [])).separator is None


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    first = FileTokenizer(train_tokenizer(tmp_path / "a.json", []))
    again = FileTokenizer(train_tokenizer(tmp_path / "b.json", []))
    other = FileTokenizer(train_tokenizer(tmp_path / "c.json", ["</s>"]))
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_batch_is_each_text_for_itself(tmp_path: Path) -> None:
    texts = [TEXT, "", "the sea", "🙂"]
    for tokenizer in (ByteTokenizer(), FileTokenizer(train_tokenizer(tmp_path / "t.json", []))):
        batch = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
        assert batch == [tokenizer.encode(text).tolist() for text in texts]
        assert [tokenizer.decode(ids) for ids in batch] == texts


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"data\.tokenizer = .*none\.json: .*No such file") as caught:
        open_tokenizer(str(tmp_path / "none.json"))
    assert '"bytes"' in caught.value.remedy


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json"])
def test_another_kind_of_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(PierError, match=r"tokenizer\.json: not a tokenizer\.json"):
        open_tokenizer(str(path))


def test_a_model_must_have_room_for_every_token() -> None:
    check_vocab(256, 256)
    with pytest.raises(PierError, match=r"model\.vocab_size = 256: the tokenizer has 300 tokens; allowed: 300 or more"):
        check_vocab(300, 256)


def test_a_pretrained_model_may_lack_tokens_that_the_text_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    check_vocab(262_145, 262_144, pretrained=True)
    assert "the tokenizer has 262145 tokens, the model 262144" in caplog.text


def test_documents_are_separated_by_a_token_that_the_tokenizer_has(tmp_path: Path) -> None:
    paths = [str(train_tokenizer(tmp_path / f"{len(end)}.json", end)) for end in ([], ["<pad>", "</s>"])]
    without, with_end = (DataSection(tokenizer=path, document_mask=True) for path in paths)
    assert document_separator(with_end) == 1
    assert document_separator(DataSection(tokenizer=paths[0])) is None
    with pytest.raises(PierError, match="has no token that separates documents") as caught:
        document_separator(without)
    assert "<|endoftext|>" in caught.value.remedy


@given(before=st.binary(max_size=8), made=st.binary(max_size=30))
@example(before=b"\xf1", made=b"\x80\x80\xc0\x80")
@example(before=b"", made=b"\x80\xf0\x9f\x98\x82")
def test_what_is_spelled_is_the_text(before: bytes, made: bytes) -> None:
    spelling = Spelling(ByteTokenizer(), [])
    text = "".join([*(spelling.push(byte) for byte in before + made), spelling.end()])
    assert text == (before + made).decode(errors="replace")


def test_a_character_comes_with_its_last_byte() -> None:
    spelling = Spelling(ByteTokenizer(), list("né".encode())[:2])
    assert [spelling.push(byte) for byte in "東".encode()] == ["", "", "東"]
    assert spelling.push(0xE6) == ""
    assert spelling.end() == BROKEN
