from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection
from pier_node.trainer.data.documents import Document, Entry
from pier_node.trainer.data.sources import Source, open_source, stdlib_entries


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
