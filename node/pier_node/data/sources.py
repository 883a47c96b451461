"""Where documents come from: [data] source and path -> a Source that yields (name, text) in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pier_node.config import DataSection
from pier_node.data.files import Document, Entry, find_entries
from pier_node.data.jsonl import read_jsonl
from pier_node.data.parquet import read_parquet
from pier_node.data.stdlib import read_stdlib, stdlib_entries
from pier_node.data.text import read_text
from pier_node.errors import PierError


@dataclass(frozen=True)
class Source:
    """The files of a data set and how one of them is read."""

    entries: list[Entry]
    read: Callable[[Entry], Iterator[Document]]

    def documents(self) -> Iterator[Document]:
        """All documents that hold text, one file after the other. Raises PierError when a file cannot be read."""
        for entry in self.entries:
            try:
                yield from (document for document in self.read(entry) if document.text)
            except OSError as error:
                raise PierError(f"{entry.path}: {error.strerror}", "Make the file readable, or remove it.") from error


def no_text() -> PierError:
    """The error of a source without a document."""
    return PierError("the data has no text in it", "Give files with text: [data] path, or --dataset PATH.")


def open_source(config: DataSection, path: str | None = None) -> Source:
    """The source that [data] describes; `path` replaces its path (and the built-in text) at this site.

    Raises:
        PierError: there is no such path, or no file in it.
    """
    if config.source == "stdlib" and not path:
        return Source(stdlib_entries(), read_stdlib)
    if config.source == "builtin" and not path:
        from pier_node.data.builtin import builtin_source  # which is made of sources

        return builtin_source(config.path)
    root = Path(path or config.path).expanduser()
    if config.source == "jsonl":
        return Source(find_entries(root, ".jsonl"), partial(read_jsonl, field=config.text_field))
    if config.source == "parquet":
        return Source(find_entries(root, ".parquet"), partial(read_parquet, field=config.text_field))
    return Source(find_entries(root), read_text)
