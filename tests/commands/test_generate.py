from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from pier_node.commands.generate import pieces, printable
from pier_node.rounds.weights import newest_weights
from pier_node.trainer.data.tokens import BROKEN, LONGEST, ByteTokenizer, FileTokenizer
from pier_node.trainer.model.export import byte_tokenizer, export

Call = Callable[..., Result]
BYTES = ByteTokenizer()


def test_it_goes_on_from_the_prompt(call: Call, site: Path) -> None:
    done = call("generate", "--data", site, "def main", "--tokens", "20", "--temperature", "0")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("def main")
    assert done.output.endswith("\n")
    assert done.output == call("generate", "--data", site, "def main", "--tokens", "20", "--temperature", "0").output


def test_the_seed_decides(call: Call, site: Path) -> None:
    first, again, other = (call("generate", "--data", site, "x", "--seed", seed).output for seed in (1, 1, 2))
    assert first == again != other


def test_a_model_folder_says_what_its_site_says(call: Call, site: Path, tmp_path: Path) -> None:
    weights = newest_weights(site)
    export(weights.config, weights.flat, tmp_path / "model")
    words = ["generate", "pier ", "--tokens", "30", "--top-k", "5", "--seed", "3"]
    assert call(*words, "--data", site).output == call(*words, "--model", tmp_path / "model").output


def test_an_empty_prompt_is_said(call: Call, site: Path) -> None:
    failed = call("generate", "--data", site, "")
    assert failed.exit_code == 1
    assert "prompt is empty" in failed.output


@pytest.mark.parametrize("option", [("--tokens", "-1"), ("--temperature", "-0.5"), ("--device", "warp")])
def test_options_out_of_bounds_are_said(call: Call, site: Path, option: tuple[str, str]) -> None:
    failed = call("generate", "--data", site, "x", *option)
    assert failed.exit_code != 0
    assert option[0] in failed.output


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


def test_nothing_but_letters_reaches_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x07é") == f"a{BROKEN}[2Jb\tc\nd{BROKEN}é"
