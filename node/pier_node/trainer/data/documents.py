"""The files of a data set, under names that do not depend on where a site keeps them.

Dealing documents: one part to validate on, at every site the same, and a part to train on for each slot.

A document's part follows from its name and its text alone, by BLAKE2b, so that sites with the same data agree without
a word, and more data moves no document that was dealt before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pier_node.base.errors import PierError


class Document(NamedTuple):
    """A piece of text that is dealt as a whole; its name is unique in its source and the same at every site."""

    name: str
    text: str


class Entry(NamedTuple):
    """A file and its path below the data set's folder; the name is empty when the data set is that one file."""

    name: str
    path: Path


def find_entries(root: Path, suffix: str = "", left_out: frozenset[str] = frozenset()) -> list[Entry]:
    """The file `root`, or all files with this suffix in the folder `root` and below, sorted by name.

    Files and folders that are hidden or have a name in `left_out` do not count.

    Raises:
        PierError: there is no such file or folder, a folder cannot be read, or no file is in it.
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
"""What held-out documents of a domain are for: to accept an expert, to fit the prior of a mixture, to score it."""
SPLITS: tuple[Split, ...] = get_args(Split)


def part_of(document: Document, validation: float, slots: int) -> int:
    """The slot in 0..slots-1 that trains on a document, or VALIDATION for about the fraction `validation` of them."""
    name, text = document.name.encode(errors="surrogateescape"), document.text.encode()
    digest = hashlib.blake2b(b"%b\0%b" % (name, text), digest_size=16).digest()
    if int.from_bytes(digest[:8], "big") < int(validation * 2**64):
        return VALIDATION
    return int.from_bytes(digest[8:], "big") % slots
