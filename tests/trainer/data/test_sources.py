from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection
from pier_node.trainer.data import sources
from pier_node.trainer.data.corpus import open_corpus
from pier_node.trainer.data.sources import (
    BUILTIN_PIECE,
    CHUNK,
    FAMILIES,
    PIECE,
    ROWS,
    SMALLEST_PIECE,
    TOPICS,
    VALIDATION,
    Document,
    Entry,
    Source,
    builtin_source,
    cut,
    find_entries,
    first_bad_line,
    open_source,
    part_of,
    read_jsonl,
    read_parquet,
    read_stdlib,
    read_text,
    split,
    stdlib_entries,
)


def documents(path: Path, **config: Any) -> list[Document]:
    return list(open_source(DataSection(path=str(path), **config)).documents())


def test_text_takes_every_text_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in {"a.md": "first", "sub/b.rst": "second", "empty.txt": ""}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    expected = [Document("a.md#0", "first"), Document("sub/b.rst#0", "second")]
    assert documents(tmp_path, source="text") == expected


def test_jsonl_takes_the_configured_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "first"}\n{"body": ""}\n')
    (tmp_path / "notes.txt").write_text("not data")
    assert documents(tmp_path, source="jsonl", text_field="body") == [Document("a.jsonl:1", "first")]


def test_parquet_takes_the_configured_column(tmp_path: Path) -> None:
    arrow: Any = pyarrow
    arrow.parquet.write_table(arrow.table({"body": ["first", "", "third"]}), tmp_path / "a.parquet")
    expected = [Document("a.parquet:0", "first"), Document("a.parquet:2", "third")]
    assert documents(tmp_path, source="parquet", text_field="body") == expected


@pytest.mark.parametrize(("at", "problem"), [(4, "Couldn't deserialize"), (100, "damaged, or not UTF-8 text")])
def test_a_damaged_parquet_file_is_named_with_what_is_wrong(tmp_path: Path, at: int, problem: str) -> None:
    arrow: Any = pyarrow
    file = tmp_path / "a.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    arrow.parquet.write_table(arrow.table({"text": ["a" * 200]}), file, **plain)
    content = bytearray(file.read_bytes())
    content[at : at + 50] = b"\xff" * 50
    file.write_bytes(content)
    with pytest.raises(PierError, match=rf"a\.parquet: {problem}"):
        documents(tmp_path, source="parquet")


def test_a_path_at_one_site_replaces_the_configured_one(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("here")
    config = DataSection(source="text", path="/nowhere")
    assert list(open_source(config, str(tmp_path / "here.txt")).documents()) == [Document("#0", "here")]
    assert list(open_source(DataSection(), str(tmp_path)).documents()) == [Document("here.txt#0", "here")]


def test_the_default_is_the_standard_library() -> None:
    assert open_source(DataSection()).entries == open_source(DataSection(), "").entries == stdlib_entries()


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    def read(entry: Entry) -> Any:
        return iter([Document("", entry.path.read_text())])

    with pytest.raises(PierError, match=r"gone\.txt: No such file") as caught:
        list(Source([Entry("", tmp_path / "gone.txt")], read).documents())
    assert "readable" in caught.value.remedy


plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
pieces = st.builds(Document, plain, plain)
fractions = st.floats(0.001, 0.5)
slots = st.integers(1, 1024)

# From `b2sum -l 128`, at validation = 0.25 and 7 slots.
GOLDEN = {
    Document("", ""): 6,
    Document("a.txt#0", "The quick brown fox\n"): VALIDATION,
    Document("a.txt#1", "The quick brown fox\n"): VALIDATION,
    Document("sub/b.md#0", "é 🙂"): 1,
}


@given(pieces, fractions, slots)
def test_every_document_has_one_part(document: Document, validation: float, count: int) -> None:
    part = part_of(document, validation, count)
    assert part == VALIDATION or 0 <= part < count
    assert part == part_of(Document(*document), validation, count)


@given(pieces, fractions, slots, slots)
def test_validation_is_the_same_whatever_the_slots(document: Document, validation: float, a: int, b: int) -> None:
    held_out = [part_of(document, validation, count) == VALIDATION for count in (a, b)]
    assert held_out[0] == held_out[1]


@given(pieces, slots)
def test_a_larger_validation_part_only_takes(document: Document, count: int) -> None:
    small, large = (part_of(document, validation, count) for validation in (0.1, 0.4))
    assert large in (small, VALIDATION)


def test_parts_have_the_sizes_asked_for() -> None:
    many = [Document(f"{number}", "same text") for number in range(20_000)]
    sizes = Counter(part_of(document, 0.1, 4) for document in many)
    assert abs(sizes[VALIDATION] - 2000) < 200
    assert all(abs(sizes[slot] - 4500) < 300 for slot in range(4))


def test_name_and_text_both_decide() -> None:
    def parts(made: list[Document]) -> int:
        return len({part_of(document, 0.01, 1024) for document in made})

    assert parts([Document(f"{number}", "x") for number in range(20)]) > 10
    assert parts([Document("x", f"{number}") for number in range(20)]) > 10


def test_the_dealing_never_changes() -> None:
    assert {document: part_of(document, 0.25, 7) for document in GOLDEN} == GOLDEN


def test_a_file_name_that_is_not_utf8_can_be_dealt() -> None:
    assert 0 <= part_of(Document("caf\udce9#0", "x"), 1e-9, 3) < 3


CODE = '''"""The module, café."""
import os
def plain(): return "kept"
class Thing:
    """Of the class.

    More."""
    if os.name:
        async def inner(self):
            'of a method'; return "also kept"
text = """no docstring"""
'''


def test_docstrings_are_cut_out_and_kept_by_themselves() -> None:
    docstrings, rest = split(CODE)
    assert docstrings == '"""The module, café."""\n"""Of the class.\n\n    More."""\n\'of a method\''
    assert all(kept in rest for kept in ('return "kept"', '; return "also kept"', '"""no docstring"""', "import os"))
    assert not any(cut in rest for cut in ("café", "of the class", "of a method"))
    assert len(docstrings) + len(rest) == len(CODE) + 2, "two line ends between three docstrings"


@pytest.mark.parametrize("code", ["", "x = (", "print 'old'", "\n\n# a comment"])
def test_what_has_none_or_is_no_python_is_all_rest(code: str) -> None:
    assert split(code) == ("", code)


def test_there_are_enough_unlike_domains() -> None:
    assert len(FAMILIES) >= 6
    with pytest.raises(PierError):
        builtin_source("cooking")


def test_families_hold_files_of_their_own() -> None:
    files = {name: {entry.name for entry in builtin_source(name).entries} for name in FAMILIES}
    for name, own in files.items():
        assert own, name
        for other, others in files.items():
            assert name == other or "docstrings" in (name, other) or own.isdisjoint(others)


@pytest.mark.parametrize("name", ["topics", "numbers"])
def test_documents_are_pieces_with_names_of_their_own(name: str) -> None:
    documents = [*builtin_source(name).documents()]
    assert len({document.name for document in documents}) == len(documents)
    assert sum(len(document.text) for document in documents) > 200_000


def test_source_and_docstrings_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "numbers.py"
    path.write_text(CODE + "x = 1\n" * BUILTIN_PIECE)
    monkeypatch.setattr(sources, "stdlib_entries", lambda: [Entry("random.py", path)])
    source, docstrings = ([*builtin_source(name).documents()] for name in ("numbers", "docstrings"))
    assert [document.name for document in source] == [f"random.py#{number}" for number in range(len(source))]
    assert len(source) > 1
    assert "".join(document.text for document in source) == split(path.read_text())[1]
    assert "".join(document.text for document in docstrings) == split(path.read_text())[0]


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def names_of(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_a_file_has_no_name_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "some.txt")
    assert find_entries(tmp_path / "some.txt") == [Entry("", tmp_path / "some.txt")]


def test_a_folder_is_walked_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a/z.txt", "a/b/c.md", "c")
    assert names_of(find_entries(tmp_path)) == ["a/b/c.md", "a/z.txt", "b.txt", "c"]


def test_names_do_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    write(tmp_path / "here", "a/b.txt")
    write(tmp_path / "elsewhere" / "deeper", "a/b.txt")
    assert names_of(find_entries(tmp_path / "here")) == names_of(find_entries(tmp_path / "elsewhere" / "deeper"))


def test_hidden_broken_and_unwanted_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, ".git/config", ".hidden", "seen.py", "seen.txt", "test/seen.py")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere")
    assert names_of(find_entries(tmp_path, ".py", frozenset({"test"}))) == ["seen.py"]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"nowhere: no such file or folder") as caught:
        find_entries(tmp_path / "nowhere")
    assert "--dataset PATH" in caught.value.remedy


def test_a_pipe_is_not_called_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PierError, match=r"pipe: neither a file nor a folder"):
        find_entries(tmp_path / "pipe")


@pytest.mark.parametrize(("suffix", "said"), [("", "no visible file"), (".jsonl", "no .jsonl file")])
def test_a_folder_without_a_file_is_an_error(tmp_path: Path, suffix: str, said: str) -> None:
    write(tmp_path, ".hidden")
    with pytest.raises(PierError, match=said):
        find_entries(tmp_path, suffix)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PierError, match=f"{tmp_path}: Permission denied"):
        find_entries(tmp_path)


def read(tmp_path: Path, data: bytes, field: str = "text") -> list[Document]:
    path = tmp_path / "some.jsonl"
    path.write_bytes(data)
    return list(read_jsonl(Entry("some.jsonl", path), field))


def test_a_line_is_a_document(tmp_path: Path) -> None:
    data = '{"text": "one\\n", "id": 1}\n\n  \n{"id": 2, "text": "zwei é"}'.encode()
    assert read(tmp_path, data) == [Document("some.jsonl:1", "one\n"), Document("some.jsonl:4", "zwei é")]


def test_another_field_can_be_the_text(tmp_path: Path) -> None:
    assert read(tmp_path, b'{"text": "no", "body": "yes"}', "body") == [Document("some.jsonl:1", "yes")]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    [document] = read(tmp_path, rb'{"text": "a\ud800b \ud83d\ude42"}')
    assert document.text == "a?b 🙂"


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        (b"{oops", r"line 2: not JSON: Expecting property name", "one JSON object in UTF-8"),
        (b'{"text": "\xff"}', r"line 2: not JSON: .*utf-8", "one JSON object in UTF-8"),
        (b'["text"]', r"line 2: not a JSON object", "one JSON object"),
        (b'{"body": "x", "id": 1}', r'line 2: no field "text"', "one of the line's fields: body, id."),
        (b"{}", r'line 2: no field "text"', "fields: none."),
        (b'{"text": 7}', r'line 2: field "text" is not text', "text_field"),
        (b'{"text": null}', r'line 2: field "text" is not text', "text_field"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, problem: str, remedy: str) -> None:
    with pytest.raises(PierError, match=problem) as caught:
        read(tmp_path, b'{"text": "good"}\n' + line + b"\n")
    assert remedy in caught.value.remedy
    assert "some.jsonl" in caught.value.problem


arrow: Any = pyarrow


def entry_of(tmp_path: Path, columns: dict[str, Any], **options: Any) -> Entry:
    path = tmp_path / "some.parquet"
    arrow.parquet.write_table(arrow.table(columns), path, **options)
    return Entry("some.parquet", path)


def test_a_row_is_a_document_and_null_is_none(tmp_path: Path) -> None:
    entry = entry_of(tmp_path, {"id": [1, 2, 3], "text": ["one", None, "drei é"]})
    assert list(read_parquet(entry, "text")) == [
        Document("some.parquet:0", "one"),
        Document("some.parquet:2", "drei é"),
    ]


def test_names_are_the_same_however_rows_are_grouped(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2 * ROWS + 7)]
    large = {"text": arrow.array(texts, arrow.large_string())}
    documents = list(read_parquet(entry_of(tmp_path, large, row_group_size=100), "text"))
    assert [document.text for document in documents] == texts
    assert [document.name for document in documents] == [f"some.parquet:{number}" for number in range(len(texts))]
    assert list(read_parquet(entry_of(tmp_path, {"text": texts}), "text")) == documents


def test_a_missing_column_is_an_error_that_lists_the_columns(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r'some\.parquet: no column "text"') as caught:
        list(read_parquet(entry_of(tmp_path, {"body": ["x"], "id": [1]}), "text"))
    assert "one of its columns: body, id." in caught.value.remedy


def test_a_column_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PierError, match='column "id" holds int64, not text'):
        list(read_parquet(entry_of(tmp_path, {"id": [1]}), "id"))


def test_another_kind_of_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    path.write_bytes(b"plainly not parquet")
    with pytest.raises(PierError, match=r"some\.parquet: not a Parquet file"):
        list(read_parquet(Entry("some.parquet", path), "text"))


def test_a_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(tmp_path, {"text": ["x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PierError, match="needs pyarrow") as caught:
        list(read_parquet(entry, "text"))
    assert "scripts/install parquet" in caught.value.remedy


@pytest.fixture(scope="module")
def stdlib() -> list[Document]:
    return [document for entry in stdlib_entries() for document in read_stdlib(entry)]


def test_it_is_about_10_mb_of_python(stdlib: list[Document]) -> None:
    assert 7e6 < sum(len(document.text) for document in stdlib) < 20e6
    names = [document.name for document in stdlib]
    assert "json/decoder.py#0" in names
    assert len(set(names)) == len(names)


def test_help_topics_read_as_on_the_screen(stdlib: list[Document]) -> None:
    [topic] = [document.text for document in stdlib if document.name == f"{TOPICS}:with"]
    assert topic.startswith('The "with" statement\n')
    assert not any(document.name.startswith(f"{TOPICS}#") for document in stdlib)


def test_nothing_is_of_one_machine_or_packaged_apart(stdlib: list[Document]) -> None:
    parts = {part for document in stdlib for part in Path(document.name.split("#")[0]).parts}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "lib2to3", "tkinter", "sitecustomize.py"})
    assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)


def test_three_slots_share_more_than_5_mb_and_open_soon(tmp_path: Path) -> None:
    start = time.process_time()
    corpora = [open_corpus(DataSection(), slot, 3, None, tmp_path) for slot in range(3)]
    assert time.process_time() - start < 20, "seconds of this process's own, on any machine"
    assert sum(len(corpus.train) for corpus in corpora) > 5e6
    assert min(len(corpus.train) for corpus in corpora) > 1.5e6
    assert min(len(corpus.validation) for corpus in corpora) > 5e4


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
