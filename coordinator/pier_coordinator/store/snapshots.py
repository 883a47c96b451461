"""Snapshots of the board in the database: a snapshot replaces the facts that it was made of, which are then deleted.

Otherwise the database would grow, and a start would take longer, for as long as a run lasts. A snapshot consists of
parts; its number is that of the last fact in it. It counts from `finish` on, once all its parts are stored. Parts are
stored, and facts deleted, in small steps, between which the coordinator stores what sites report.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from sqlite3 import Connection
from typing import Any

from pier_coordinator.store.facts import LASTING
from pier_coordinator.store.writer import Transaction

SNAPSHOT = "snapshot"
"""Key of meta: the number of the snapshot that counts."""
FACTS, PARTS = 1000, 64
"""Maximum number of facts, and of parts of a snapshot, deleted at a time."""


def pack(part: Mapping[str, Any]) -> bytes:
    """A part as it is stored: compressed JSON, in which arrays are base64."""
    return zlib.compress(json.dumps(part, separators=(",", ":"), default=_packed).encode(), 1)


def unpack(raw: bytes) -> dict[str, Any]:
    """The part that `pack` packed."""
    part: dict[str, Any] = json.loads(zlib.decompress(raw), object_hook=_unpacked)
    return part


def _packed(values: Any) -> dict[str, str]:
    if not isinstance(values, array):
        raise TypeError(f"a snapshot cannot hold a {type(values).__name__}")
    return {"array": values.typecode, "base64": base64.b64encode(values.tobytes()).decode()}


def _unpacked(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"array", "base64"}:
        return fields
    return array(fields["array"], base64.b64decode(fields["base64"]))


def put_parts(transaction: Transaction, number: int, first: int, parts: Iterable[bytes]) -> None:
    """Store parts first, first + 1, … of the snapshot with this number."""
    rows = ((number, at, raw) for at, raw in enumerate(parts, start=first))
    transaction.connection.executemany("INSERT INTO snapshots VALUES (?, ?, ?)", rows)


def finish(transaction: Transaction, number: int) -> None:
    """Make the snapshot with this number the one that counts: all its parts are stored."""
    transaction.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", SNAPSHOT, str(number))


def forget(transaction: Transaction) -> int:
    """Delete some of the parts and facts that the snapshot that counts replaces; return how many.

    The newest fact of the run and of each site stay: a new event log begins with them.
    """
    number = number_of(transaction.connection)
    parts = transaction.execute(
        "DELETE FROM snapshots WHERE rowid IN (SELECT rowid FROM snapshots WHERE number <> ? LIMIT ?)", number, PARTS
    )
    facts = transaction.execute(
        f"DELETE FROM facts WHERE number IN (SELECT number FROM facts WHERE number <= ? AND number NOT IN"
        f" (SELECT max(number) FROM facts WHERE {LASTING} GROUP BY node) ORDER BY number LIMIT ?)",
        *(number, FACTS),
    )
    return parts.rowcount + facts.rowcount


def number_of(connection: Connection) -> int:
    """Number of the snapshot that counts; 0: there is none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (SNAPSHOT,)).fetchone()
    return 0 if row is None else int(row[0])


def parts_of(connection: Connection, number: int) -> Iterator[bytes]:
    """The parts of a snapshot, in order."""
    for (raw,) in connection.execute("SELECT body FROM snapshots WHERE number = ? ORDER BY part", (number,)):
        yield raw


def size_of(connection: Connection, number: int) -> int:
    """The size of a snapshot, in bytes."""
    (size,) = connection.execute("SELECT total(length(body)) FROM snapshots WHERE number = ?", (number,)).fetchone()
    return int(size)
