"""JSONL: one JSON object a line, its text in one field."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pier_node.data.files import Document, Entry
from pier_node.errors import PierError


def read_jsonl(entry: Entry, field: str) -> Iterator[Document]:
    """A document a line; blank lines are none.

    Raises:
        PierError: a line is not a JSON object with text in `field`; its number is named.
    """
    with entry.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Document(f"{entry.name}:{number}", _text(line, field, f"{entry.path}, line {number}"))


def _text(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PierError(f"{where}: not JSON: {error}", "Each line must be one JSON object in UTF-8.") from error
    if not isinstance(record, dict):
        raise PierError(f"{where}: not a JSON object", "Each line must be one JSON object.")
    if field not in record:
        shown = ", ".join(list(record)[:10]) or "none"
        raise PierError(f'{where}: no field "{field}"', f"Set [data] text_field to one of the line's fields: {shown}.")
    if not isinstance(record[field], str):
        raise PierError(f'{where}: field "{field}" is not text', "Set [data] text_field to a string field.")
    # JSON can escape half a surrogate pair, which no UTF-8 text can hold.
    return str(record[field]).encode(errors="replace").decode()
