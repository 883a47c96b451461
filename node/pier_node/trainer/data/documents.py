"""The files of a data set, and how documents are assigned: to validation, the same at every site, or to a slot.

File names do not depend on where a site keeps the files. The part of a document depends only on its name and its text,
through BLAKE2b. So sites with the same data agree without communication, and additional data moves no document.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pier_node.base.errors import PierError


class Document(NamedTuple):
    """A piece of text that is assigned as a whole. Its name is unique in its source and the same at every site."""

    name: str
    text: str


class Entry(NamedTuple):
    """A file and its path below the data set's folder; the name is empty if the data set is that one file."""

    name: str
    path: Path


def find_entries(root: Path, suffix: str = "", left_out: frozenset[str] = frozenset()) -> list[Entry]:
    """The file `root`, or all files with this suffix in the folder `root` and below, sorted by name.

    Hidden files and folders, and those named in `left_out`, are skipped.

    Raises:
        PierError: there is no such file or folder, a folder cannot be read, or it contains no file.
    """
    if root.is_file():
        return [Entry("", root)]
    if not root.is_dir():
        raise PierError(f"data path {root}: no such file or folder", "Correct [data] path, or give --dataset PATH.")
    found = (path for path in _walk(root, left_out) if path.name.endswith(suffix) and path.is_file())
    entries = sorted(Entry(path.relative_to(root).as_posix(), path) for path in found)
    if not entries:
        raise PierError(f"data path {root}: the folder has no {suffix or 'visible'} file", "Put the data there.")
    return entries


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[Path]:
    def counts(name: str) -> bool:
        return not name.startswith(".") and name not in left_out

    for folder, below, names in os.walk(root, onerror=_refuse):
        below[:] = filter(counts, below)
        yield from (Path(folder, name) for name in filter(counts, names))


def _refuse(error: OSError) -> None:
    raise PierError(f"{error.filename}: {error.strerror}", "Make the folder readable, or move it away.") from error


VALIDATION = -1
"""The part that no site trains on."""
HELD_OUT = 0.1
"""The fraction of a domain's documents that no expert trains on."""

Split = Literal["dev", "prior", "test"]
"""The uses of a domain's held-out documents: to accept an expert, to fit the prior of a mixture, and to score it."""
SPLITS: tuple[Split, ...] = get_args(Split)


def part_of(document: Document, validation: float, slots: int) -> int:
    """The slot, 0..slots-1, that trains on a document; VALIDATION for about the fraction `validation` of documents."""
    name, text = document.name.encode(errors="surrogateescape"), document.text.encode()
    digest = hashlib.blake2b(b"%b\0%b" % (name, text), digest_size=16).digest()
    if int.from_bytes(digest[:8], "big") < int(validation * 2**64):
        return VALIDATION
    return int.from_bytes(digest[8:], "big") % slots
