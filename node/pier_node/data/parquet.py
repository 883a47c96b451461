"""Parquet: one row a document, its text in one column. Needs pyarrow, which is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pier_node.data.files import Document, Entry
from pier_node.errors import PierError

ROWS = 1024
"""Rows that are decoded at once."""


def read_parquet(entry: Entry, field: str) -> Iterator[Document]:
    """A document a row; rows without a value are none.

    Raises:
        PierError: pyarrow is missing, the file is not Parquet, or has no text column of that name.
    """
    number = 0
    with _open(entry, field) as file:
        for batch in file.iter_batches(ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text is not None:
                    yield Document(f"{entry.name}:{number}", text)
                number += 1


def _open(entry: Entry, field: str) -> Any:
    try:
        arrow, parquet = (import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise PierError(
            'data source "parquet" needs pyarrow', "In the clone of Pier: scripts/install parquet"
        ) from error
    try:
        file = parquet.ParquetFile(entry.path)
    except arrow.ArrowInvalid as error:
        raise PierError(f"{entry.path}: not a Parquet file: {error}", "Replace it, or remove it.") from error
    schema = file.schema_arrow
    if field not in schema.names:
        shown = ", ".join(schema.names[:10])
        raise PierError(f'{entry.path}: no column "{field}"', f"Set [data] text_field to one of its columns: {shown}.")
    kind = schema.field(field).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise PierError(f'{entry.path}: column "{field}" holds {kind}, not text', "Set [data] text_field to another.")
    return file
