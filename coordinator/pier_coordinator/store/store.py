"""The coordinator's store: every method that changes it returns once the change would survive kill -9.

What is read is what is committed. Readers and the writer never wait for each other. The schema of the database is given
as numbered steps: step n migrates a database from `user_version` n - 1 to n.

Old samples and log lines below warnings are thinned out: after a day, one of each per site per five minutes remains.
The log keeps all of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from logging import INFO
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

from pier_coordinator.store.experts import AcceptedPlan, newest
from pier_coordinator.store.facts import Fact, fact_of, last_number
from pier_coordinator.store.log import LogWriter
from pier_coordinator.store.sites import InviteRow, OrderRow, SiteRow
from pier_coordinator.store.writer import Told, Transaction, Writer
from pier_node.base.errors import PierError

LOG_NAME = "events.jsonl"
PAGE = 1000
"""Number of facts read at a time, so that no reader blocks the checkpoint of the write-ahead log for long."""

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """An open database and the event log beside it. It must be created and used in one running event loop.

    Only the thread that created it may use it.
    """

    def __init__(self, path: Path, told: Told) -> None:
        """Open or create it; `told` gets every fact once it is stored, in order. Raises PierError."""
        self._path, self._lock = path, _lock(path)
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # or a commit waits for the disk every second
            migrate(self._connection, path)
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

    def passing(self, kind: str, after: int, before: float, count: int) -> list[tuple[int, float, str]]:
        """Number, time and site of the next samples, or notes below warnings, up to the first one since `before`."""
        rows = self._reading.execute(
            "SELECT number, time, node FROM facts WHERE kind = ? AND number > ? "
            "AND (kind = 'sample' OR json_extract(body, '$.level') <= ?) ORDER BY number LIMIT ?",
            (kind, after, INFO, count),
        ).fetchall()
        young = next((index for index, row in enumerate(rows) if row["time"] >= before), len(rows))
        return [(row["number"], row["time"], row["node"]) for row in rows[:young]]


def unusable(path: Path, error: Exception) -> PierError:
    """The error to show for a database that cannot be used."""
    return PierError(
        f"{path}: {error}",
        "Make sure that the folder is there, that the disk is not full, and that this user may write to it; "
        "if the file is broken, restore it from a backup.",
    )


def _checkpoint(path: Path) -> None:
    """Move most of the write-ahead log while others write; then, briefly without writers, the rest, and empty it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for mode in ("PASSIVE", "TRUNCATE"):
            connection.execute(f"PRAGMA wal_checkpoint({mode})")


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


DAY = 24 * 3600.0
SPAN = 300.0
STEP = 1000
"""Maximum number of samples read, and deleted, at a time."""


class Thinning:
    """Thins out old samples and log lines. It continues where it stopped; after a start, it begins with the first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done = {"sample": 0, "note": 0}
        self._kept: dict[tuple[str, str], float] = {}

    async def run(self, now: float) -> int:
        """Thin out what is old at `now`; return how many facts were deleted. Raises sqlite3.Error."""
        count = 0
        for kind in self._done:
            while old := self._store.passing(kind, self._done[kind], now - DAY, STEP):
                extra = [number for number, time, node in old if not self._keeps((kind, node), time)]
                await self._store.do(_forget, extra)
                self._done[kind] = old[-1][0]
                count += len(extra)
        return count

    def _keeps(self, source: tuple[str, str], time: float) -> bool:
        span = time // SPAN
        fresh = self._kept.get(source) != span
        self._kept[source] = span
        return fresh


def _forget(transaction: Transaction, numbers: Iterable[int]) -> None:
    """Delete facts; the log keeps them."""
    transaction.connection.executemany("DELETE FROM facts WHERE number = ?", ((number,) for number in numbers))


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
