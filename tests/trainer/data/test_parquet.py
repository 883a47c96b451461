from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pier_node.base.errors import PierError
from pier_node.trainer.data.documents import Document, Entry
from pier_node.trainer.data.sources import ROWS, read_parquet

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
