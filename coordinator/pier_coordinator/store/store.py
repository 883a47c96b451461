"""The coordinator's store: every method that changes it returns once the change would survive kill -9.

What is read is what is committed. Readers and the writer never wait for each other. The schema of the database is given
as numbered steps: step n migrates a database from `user_version` n - 1 to n.

A snapshot (snapshots.py) replaces old facts, so that the database stays small. The log has them longer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from pier_coordinator.store.experts import AcceptedPlan, newest
from pier_coordinator.store.facts import Fact, fact_of, last_number
from pier_coordinator.store.log import LogWriter
from pier_coordinator.store.sites import InviteRow, OrderRow, SiteRow
from pier_coordinator.store.snapshots import number_of, parts_of, size_of, unpack
from pier_coordinator.store.writer import Told, Transaction, Writer
from pier_node.base.errors import PierError

LOG_NAME = "events.jsonl"
PAGE = 1000
"""Number of facts read at a time, so that no reader blocks the checkpoint of the write-ahead log for long."""
SHRINKS = 512 << 20
"""Free bytes in the database from which on it is made smaller at a start: after an upgrade from a version without
snapshots, mostly."""

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """An open database and the event log beside it. It must be created and used in one running event loop.

    Only the thread that created it may use it.
    """

    def __init__(self, path: Path, told: Told) -> None:
        """Open or create it; `told` gets every fact once it is stored, in order. Raises PierError."""
        self._path, self._lock = path, _lock(path)
        _require_kept(path)
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # or a commit waits for the disk every second
            migrate(self._connection, path)
            _shrink(self._connection)
            self._log = LogWriter(self._connection, path.with_name(LOG_NAME))
            self._reading = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            self._reading.row_factory = sqlite3.Row
        except (OSError, ValueError, sqlite3.Error) as error:
            raise unusable(path, error) from error
        self._writer = Writer(self._connection, last_number(self._connection), self._log.write, told)

    async def close(self) -> None:
        """Close it after all earlier operations are done."""
        await self._writer.close()
        self._reading.close()
        self._connection.close()
        self._log.close()
        self._lock.close()

    @property
    def folder(self) -> Path:
        """The folder that holds the database and everything else that the run must remember."""
        return self._path.parent

    @property
    def problem(self) -> str:
        """Why the disk took nothing when the database or the event log was last written; "" if it did."""
        return self._writer.problem or self._log.problem

    async def tidy(self) -> None:
        """Move what was committed from the write-ahead log into the database, in a thread. Call it now and then."""
        await asyncio.to_thread(_checkpoint, self._path)

    async def do(self, operation: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one of the operations of sites.py or experts.py in a transaction; return its result.

        Raises:
            sqlite3.Error: the database cannot be written: the disk is full, or it was closed.
            Exception: whatever the operation raised; it has then changed nothing.
        """
        return await self._writer.do(lambda transaction: operation(transaction, *args, **kwargs))

    async def add_facts(self, facts: Iterable[Fact]) -> list[Fact]:
        """Store facts; return them with their numbers. Raises ValueError for a number that JSON cannot hold."""
        return await self._writer.do(lambda transaction: transaction.add(facts))

    # --- reading -------------------------------------------------------------------------------

    def facts(self, after: int = 0) -> Iterator[Fact]:
        """The facts with numbers above `after`, in order."""
        while page := self._reading.execute(
            "SELECT * FROM facts WHERE number > ? ORDER BY number LIMIT ?", (after, PAGE)
        ).fetchall():
            yield from map(fact_of, page)
            after = page[-1]["number"]

    def sites(self) -> list[SiteRow]:
        """All sites that were ever enrolled, in the order of their enrolment."""
        return [SiteRow.of(row) for row in self._reading.execute("SELECT * FROM sites ORDER BY enrolled_at, node")]

    def revoked(self) -> list[str]:
        """Node ids of the revoked sites, the latest last."""
        rows = self._reading.execute("SELECT node FROM sites WHERE revoked_at IS NOT NULL ORDER BY revoked_at, node")
        return [str(row["node"]) for row in rows]

    def invites(self) -> list[InviteRow]:
        """All invites, the newest first."""
        return [InviteRow.of(row) for row in self._reading.execute("SELECT * FROM invites ORDER BY created DESC, id")]

    def orders(self) -> list[OrderRow]:
        """The newest order to each site."""
        return [OrderRow.of(row) for row in self._reading.execute("SELECT * FROM orders ORDER BY node")]

    def experts(self) -> tuple[float, AcceptedPlan] | None:
        """When the current plan of experts was accepted, in seconds since the epoch, and the plan; None: no plan."""
        return newest(self._reading)

    def meta(self, key: str) -> str | None:
        """The value stored under a key; None if there is none."""
        row = self._reading.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def snapshot(self) -> tuple[int, Iterator[dict[str, Any]]]:
        """The number of the last fact in the snapshot of the board, and its parts; 0 and nothing if there is none."""
        number = number_of(self._reading)
        return number, map(unpack, parts_of(self._reading, number))

    def snapshot_bytes(self) -> int:
        """Bytes that the snapshot takes in the database."""
        return size_of(self._reading, number_of(self._reading))

    def used_bytes(self) -> int:
        """Bytes in use in the database; the file may be larger, with room for what comes."""
        pages, free, size = (_pragma(self._reading, name) for name in ("page_count", "freelist_count", "page_size"))
        return (pages - free) * size


def unusable(path: Path, error: Exception) -> PierError:
    """The error to show for a database that cannot be used."""
    return PierError(
        f"{path}: {error}",
        "Make sure that the folder is there, that the disk is not full, and that this user may write to it; "
        "if the file is broken, restore it from a backup.",
    )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _shrink(connection: sqlite3.Connection) -> None:
    """Give the disk back what has become free in the file, if that is much."""
    if _pragma(connection, "freelist_count") * _pragma(connection, "page_size") < SHRINKS:
        return
    try:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:  # it needs as much room as the database takes
        log.warning("the database could not be made smaller: %s", error)


def _checkpoint(path: Path) -> None:
    """Move most of the write-ahead log while others write; then, briefly without writers, the rest, and empty it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for mode in ("PASSIVE", "TRUNCATE"):
            connection.execute(f"PRAGMA wal_checkpoint({mode})")


def _require_kept(path: Path) -> None:
    """Check that the database of a run that has begun is still there. Raises PierError."""
    events = path.with_name(LOG_NAME)
    if events.exists() and events.stat().st_size and not (path.exists() and path.stat().st_size):
        raise PierError(
            f"{path} is empty or gone, but {LOG_NAME} beside it is of a run that has begun",
            "Restore it from a backup: with an empty one, every site of the run would be turned away, and end. Until "
            "then the sites train on without the coordinator.",
        )


def _lock(path: Path) -> BinaryIO:
    """Lock a file for as long as the database is open. Raises PierError: another coordinator holds the lock."""
    try:
        lock = path.with_name(f"{path.name}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PierError(f"{path}: a coordinator is running with it", "Stop that one first.") from error
    except OSError as error:
        raise unusable(path, error) from error
    return lock


MIGRATIONS = (
    """
    CREATE TABLE facts (
        number INTEGER PRIMARY KEY AUTOINCREMENT,  -- a number is not given again when old facts are thinned out
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        node TEXT NOT NULL,
        body TEXT NOT NULL                         -- JSON
    );
    CREATE INDEX facts_by_kind ON facts (kind);
    CREATE TABLE sites (
        node TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        enrolled_at REAL NOT NULL,
        invite TEXT NOT NULL,
        revoked_at REAL,
        address TEXT NOT NULL DEFAULT '',
        slot INTEGER,
        lease BLOB NOT NULL DEFAULT x'',
        gone INTEGER NOT NULL DEFAULT 1,
        transport TEXT NOT NULL DEFAULT '',
        version TEXT NOT NULL DEFAULT '',
        workers INTEGER NOT NULL DEFAULT 0
    );
    CREATE UNIQUE INDEX site_names ON sites (name) WHERE revoked_at IS NULL;
    CREATE TABLE invites (
        id TEXT PRIMARY KEY,
        name TEXT,
        expires REAL NOT NULL,
        uses_left INTEGER NOT NULL,
        certificate BLOB NOT NULL,                 -- PEM
        created REAL NOT NULL,
        revoked INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE streams (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        node TEXT NOT NULL,
        stream BLOB NOT NULL,
        stored INTEGER NOT NULL,
        dropped INTEGER NOT NULL,
        UNIQUE (node, stream)
    );
    CREATE TABLE orders (
        node TEXT PRIMARY KEY,
        epoch INTEGER NOT NULL,
        activity TEXT NOT NULL,
        assignment TEXT NOT NULL                   -- JSON
    );
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
    """
    CREATE TABLE expert_plans (
        id TEXT PRIMARY KEY,
        accepted_at REAL NOT NULL,
        plan TEXT NOT NULL                         -- JSON; the newest one counts
    );
    CREATE TABLE expert_jobs (
        plan TEXT NOT NULL,
        number INTEGER NOT NULL,
        node TEXT NOT NULL,                        -- of the site that trains it; '': none can
        result TEXT,                               -- JSON: what that site said when it was done
        declined TEXT NOT NULL DEFAULT '[]',       -- JSON: nodes that cannot train it
        PRIMARY KEY (plan, number)
    );
    """,
    """
    INSERT INTO meta SELECT 'revocations', CAST(latest * 1000 AS INTEGER)
        FROM (SELECT MAX(revoked_at) AS latest FROM sites) WHERE latest IS NOT NULL;
    """,
    """
    CREATE TABLE snapshots (
        number INTEGER NOT NULL,                   -- of the last fact in it
        part INTEGER NOT NULL,
        body BLOB NOT NULL,                        -- JSON, compressed
        PRIMARY KEY (number, part)
    );
    DROP INDEX facts_by_kind;
    CREATE INDEX lasting_facts ON facts (number) WHERE kind IN ('run', 'site');
    """,
    """
    ALTER TABLE expert_plans ADD COLUMN nodes TEXT NOT NULL DEFAULT '{}';  -- JSON: node ids of its sites, by name
    UPDATE expert_plans SET nodes = (SELECT json_group_object(name, node) FROM sites WHERE revoked_at IS NULL);
    """,
)


def migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Migrate a database to the newest version, each step in one transaction. Raises PierError, sqlite3.Error."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise PierError(
            f"{path} was written by a newer Pier (version {version} of its tables; this one knows {len(migrations)})",
            "Upgrade Pier here, or restore the copy of the folder from before the upgrade.",
        )
    for number, step in enumerate(migrations[version:], start=version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {step}; PRAGMA user_version = {number}; COMMIT;")
