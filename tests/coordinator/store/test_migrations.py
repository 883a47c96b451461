from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from coordinator.cases import open_store

from pier_coordinator.store.migrations import MIGRATIONS, migrate
from pier_node.base.errors import PierError

PATH = Path("run.db")
ONE, TWO = "CREATE TABLE first (a)", "ALTER TABLE first ADD COLUMN b DEFAULT 7; CREATE TABLE second (c)"


@pytest.fixture
def connection() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None)


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_a_database_of_version_1_keeps_what_it_holds(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH, (ONE,))
    connection.execute("INSERT INTO first VALUES (1)")
    migrate(connection, PATH, (ONE, TWO))
    assert connection.execute("SELECT a, b FROM first").fetchall() == [(1, 7)]
    assert version(connection) == 2
    migrate(connection, PATH, (ONE, TWO))
    assert version(connection) == 2


def test_a_step_that_fails_leaves_the_version_before_it(connection: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, PATH, (ONE, "CREATE TABLE half (a); CREATE TABLE first (a)"))
    connection.rollback()
    assert version(connection) == 1
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("first",)]


def test_all_steps_make_the_present_tables(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables >= {"facts", "sites", "invites", "streams", "orders", "meta", "expert_plans", "expert_jobs"}
    assert version(connection) == len(MIGRATIONS)


def test_a_database_that_has_revoked_sites_gets_a_version_of_their_list(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH, MIGRATIONS[:2])
    sites = [("a", None), ("b", 1000.5), ("c", 999.0)]
    connection.executemany(
        "INSERT INTO sites (node, name, enrolled_at, invite, revoked_at) VALUES (?1, ?1, 0, '', ?2)", sites
    )
    migrate(connection, PATH)
    assert connection.execute("SELECT * FROM meta").fetchall() == [("revocations", "1000500")]


def test_a_database_without_revoked_sites_gets_none(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH)
    assert connection.execute("SELECT * FROM meta").fetchall() == []


async def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(PierError, match=r"written by a newer Pier \(version 99 .*\n.*Upgrade Pier here"):
        open_store(tmp_path)
