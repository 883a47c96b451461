"""Text files: any UTF-8 file, cut into documents on line ends so that one file can be dealt to many sites."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator
from pathlib import Path

from pier_node.data.files import Document, Entry
from pier_node.errors import PierError

PIECE = 1 << 16
"""Characters in a document cut from a longer file; its last line is completed up to as many again."""
SMALLEST_PIECE = 1 << 12
PIECES = 256
"""A data set of one short file is cut finer, into about this many documents, so that every site gets some."""
CHUNK = 1 << 20

log = logging.getLogger(__name__)


def read_text(entry: Entry) -> Iterator[Document]:
    """The documents of a text file. A file of a folder that is not UTF-8 text is skipped with a warning.

    Raises:
        PierError: the data set is this one file, and it is not UTF-8 text.
    """
    bad_line = first_bad_line(entry.path)
    if bad_line is None:
        yield from cut(entry, PIECE if entry.name else _piece_size(entry.path))
    elif entry.name:
        log.warning("%s, line %d: not UTF-8 text; the file is left out", entry.path, bad_line)
    else:
        raise PierError(f"{entry.path}, line {bad_line}: not UTF-8 text", "Convert the file to UTF-8, or remove it.")


def cut(entry: Entry, piece: int) -> Iterator[Document]:
    """Documents of `piece` characters up to the next line end, of twice as many where there is none."""
    with entry.path.open(encoding="utf-8", newline="") as file:
        number = 0
        while text := file.read(piece):
            yield Document(f"{entry.name}#{number}", text + file.readline(piece))
            number += 1


def first_bad_line(path: Path) -> int | None:
    """The first line, counted from 1, with a byte that no UTF-8 text has there; None when all is well."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            if b"\0" in chunk:
                return line + chunk.count(b"\n", 0, chunk.index(b"\0"))
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return line + error.object.count(b"\n", 0, error.start)
            line += chunk.count(b"\n")
    return line if decoder.getstate()[0] else None


def _piece_size(path: Path) -> int:
    return min(max(path.stat().st_size // PIECES, SMALLEST_PIECE), PIECE)
