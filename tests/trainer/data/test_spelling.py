"""Text of the tokens that a model generates, piece by piece."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pier_node.trainer.data.tokens import BROKEN, LONGEST, ByteTokenizer, FileTokenizer, pieces
from pier_node.trainer.model.export import byte_tokenizer

BYTES = ByteTokenizer()


@given(text=st.text(), made=st.text())
def test_pieces_of_a_text_are_the_text(text: str, made: str) -> None:
    before = list(text.encode())[-LONGEST:]
    assert "".join(pieces(BYTES, before, made.encode())) == made


@given(made=st.binary(max_size=40))
def test_pieces_of_any_bytes_are_what_they_decode_to(made: bytes) -> None:
    assert "".join(pieces(BYTES, [], made)) == made.decode(errors="replace")


@given(text=st.text(min_size=1))
def test_a_character_comes_when_it_is_whole_and_not_later(text: str) -> None:
    come = list(pieces(BYTES, [], text.encode()))[:-1]
    if BROKEN not in text:
        assert come == list(text)


def test_a_tokenizer_that_drops_a_leading_space_keeps_it_within_the_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"▁pier": 0, "▁site": 1, "s": 2, "?": 3}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert list(pieces(tokenizer, [0], [1, 2, 0]))[:3] == [" site", "s", " pier"]


def test_the_exported_byte_tokenizer_gives_the_same_pieces(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    made = "Zürich, 東京\n".encode()
    assert "".join(pieces(FileTokenizer(tmp_path / "tokenizer.json"), [], made)) == made.decode()
