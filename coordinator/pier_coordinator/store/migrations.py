"""The database schema as numbered steps: step n migrates a database from `user_version` n - 1 to n."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from pier_node.base.errors import PierError

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
