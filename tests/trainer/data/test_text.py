from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.trainer.data.documents import Entry
from pier_node.trainer.data.sources import CHUNK, PIECE, SMALLEST_PIECE, cut, first_bad_line, read_text

any_text = st.text(st.sampled_from("ab\n\r é🙂"), max_size=200)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text") / "some.txt"


@given(any_text, st.integers(1, 50))
def test_pieces_join_to_the_file_and_end_with_lines(scratch: Path, text: str, piece: int) -> None:
    scratch.write_bytes(text.encode())
    documents = list(cut(Entry("n", scratch), piece))
    assert "".join(document.text for document in documents) == text
    assert [document.name for document in documents] == [f"n#{number}" for number in range(len(documents))]
    for document in documents[:-1]:
        assert piece <= len(document.text) <= 2 * piece
        assert len(document.text) == 2 * piece or document.text[-1] in "\r\n"


def test_a_file_of_a_folder_is_cut_at_about_64_kib(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("0123456789abcde\n" * 10_000)
    sizes = [len(document.text) for document in read_text(Entry("long.txt", path))]
    assert sizes == [PIECE + 16, PIECE + 16, 160_000 - 2 * PIECE - 32]


def test_a_single_file_is_cut_finer_so_that_every_site_gets_some(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("0123456789abcde\n" * 10_000)
    sizes = [len(document.text) for document in read_text(Entry("", path))]
    assert set(sizes[:-1]) == {SMALLEST_PIECE + 16}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", None),
        ("é\n🙂\n".encode(), None),
        (b"\xff", 1),
        (b"good\nb\xe9d\n", 2),
        (b"good\n\ncut off \xc3", 3),
        (b"good\nzero\0", 2),
        (b"x" * (CHUNK - 1) + "é\n".encode(), None),
        (b"\n" * CHUNK + b"\xff", CHUNK + 1),
    ],
)
def test_the_first_bad_line_is_found(tmp_path: Path, data: bytes, line: int | None) -> None:
    path = tmp_path / "some"
    path.write_bytes(data)
    assert first_bad_line(path) == line


def test_a_binary_file_of_a_folder_is_left_out_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG")
    with caplog.at_level(logging.WARNING):
        assert list(read_text(Entry("picture.png", path))) == []
    assert "picture.png, line 1: not UTF-8 text; the file is left out" in caplog.text


def test_a_data_set_that_is_one_binary_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\ntwo\ncaf\xe9\n")
    with pytest.raises(PierError, match=r"latin\.txt, line 3: not UTF-8 text") as caught:
        list(read_text(Entry("", path)))
    assert "UTF-8" in caught.value.remedy
