"""The coordinator's store: every method that changes it returns once the change would survive kill -9.

Old samples are thinned out: after a day, one sample per site per five minutes remains. The log keeps all of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from pier_coordinator.store import experts, sites
from pier_coordinator.store.experts import AcceptedPlan, Expert
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.log import LogWriter
from pier_coordinator.store.reader import Reader, last_number, unusable
from pier_coordinator.store.rows import Activity, InviteRow, OrderRow, Registration, SiteRow, Standing
from pier_coordinator.store.sites import Report
from pier_coordinator.store.writer import Told, Transaction, Writer
from pier_node.base.errors import PierError

LOG_NAME = "events.jsonl"


class Store(Reader):
    """An open database and the event log beside it. It must be created and used in one running event loop.

    The methods that write raise sqlite3.Error if the database cannot be written (the disk is full). A method that
    raises has changed nothing. `now` is in seconds since the epoch.
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
        except (OSError, ValueError, sqlite3.Error) as error:
            raise unusable(path, error) from error
        super().__init__(path)
        self._writer = Writer(self._connection, last_number(self._connection), self._log.write, told)

    async def close(self) -> None:
        """Close it after all earlier operations are done."""
        await self._writer.close()
        self.stop_reading()
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

    # --- facts ---------------------------------------------------------------------------------

    async def add_facts(self, facts: Iterable[Fact]) -> list[Fact]:
        """Store facts; return them with their numbers. Raises ValueError for a number that JSON cannot hold."""
        return await self._writer.do(lambda transaction: transaction.add(facts))

    async def take_report(self, report: Report, now: float) -> int:
        """Store the new records of a report. All records of its stream below the returned number are stored or lost."""
        return await self._writer.do(lambda transaction: sites.take_report(transaction, report, now))

    async def forget(self, numbers: Iterable[int]) -> None:
        """Delete facts; the log keeps them."""

        def delete(transaction: Transaction) -> None:
            rows = ((number,) for number in numbers)
            transaction.connection.executemany("DELETE FROM facts WHERE number = ?", rows)

        await self._writer.do(delete)

    # --- sites ---------------------------------------------------------------------------------

    async def enrol(self, node: str, name: str, invite: str, now: float) -> Standing:
        """Enrol a site for one use of an invite; a site that is enrolled already costs none. Raises Refused."""
        return await self._writer.do(lambda transaction: sites.enrol(transaction, node, name, invite, now))

    async def register(self, node: str, registration: Registration, now: float) -> Standing:
        """Register a site that starts. Raises Stranger, Refused."""
        return await self._writer.do(lambda transaction: sites.register(transaction, node, registration, now))

    async def note_presence(self, gone: bool, events: Iterable[Fact]) -> None:
        """Record that sites went silent or came back, with one event per site."""
        await self._writer.do(lambda transaction: sites.note_presence(transaction, gone, events))

    async def revoke(self, node: str, now: float) -> SiteRow:
        """Revoke a site for good. Raises Stranger."""
        return await self._writer.do(lambda transaction: sites.revoke(transaction, node, now))

    # --- what the operator does ----------------------------------------------------------------

    async def set_order(
        self,
        nodes: Collection[str] | None,
        activity: Activity | None,
        assignment: dict[str, Any] | None,
        now: float,
        by: str = sites.OPERATOR,
    ) -> list[OrderRow]:
        """Give orders to some sites, or all (`nodes` None); None keeps that part. Return the new orders."""
        return await self._writer.do(
            lambda transaction: sites.set_order(transaction, nodes, activity, assignment, now, by)
        )

    async def add_invite(self, invite: InviteRow) -> None:
        """Make an invite. Raises Refused: too many invites are open, or one for a site of this name is."""
        await self._writer.do(lambda transaction: sites.add_invite(transaction, invite))

    async def revoke_invite(self, invite: str, now: float) -> InviteRow:
        """Revoke an invite. Raises Refused: there is no invite with this id."""
        return await self._writer.do(lambda transaction: sites.revoke_invite(transaction, invite, now))

    async def accept_experts(self, plan: AcceptedPlan, now: float) -> None:
        """Make this the current plan of experts."""
        await self._writer.do(lambda transaction: experts.accept(transaction, plan, now))

    async def put_experts(self, plan: str, jobs: Collection[Expert]) -> None:
        """Store the current state of some jobs of a plan."""
        await self._writer.do(lambda transaction: experts.put(transaction, plan, jobs))

    async def put_meta(self, key: str, value: str | None) -> None:
        """Store a value under a key; None deletes it."""
        await self._writer.do(lambda transaction: sites.put_meta(transaction, key, value))


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
    """Thins out old samples. It continues where it last stopped; after a start, it begins with the first sample."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done = 0
        self._kept: dict[str, float] = {}

    async def run(self, now: float) -> int:
        """Thin out the samples that are old at `now`; return how many were deleted. Raises sqlite3.Error."""
        count = 0
        while samples := self._store.samples(self._done, now - DAY, STEP):
            extra = [number for number, time, node in samples if not self._keeps(time, node)]
            await self._store.forget(extra)
            self._done = samples[-1][0]
            count += len(extra)
        return count

    def _keeps(self, time: float, node: str) -> bool:
        span = time // SPAN
        fresh = self._kept.get(node) != span
        self._kept[node] = span
        return fresh


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
