"""Read access to the database, for the coordinator and for commands beside it. Readers and the writer never wait."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

from pier_coordinator.store.experts import AcceptedPlan, newest
from pier_coordinator.store.facts import Fact, Kind
from pier_coordinator.store.rows import InviteRow, OrderRow, SiteRow, fact_of
from pier_node.base.errors import PierError

PAGE = 1000
"""Number of facts read at a time, so that no reader blocks the checkpoint of the write-ahead log for long."""


class Reader:
    """Reads what is committed. Only the thread that created it may use it."""

    def __init__(self, path: Path) -> None:
        """Open the database read-only. Raises PierError."""
        try:
            self._reading = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            self._reading.row_factory = sqlite3.Row
            self._reading.execute("SELECT 1 FROM facts LIMIT 1")
        except sqlite3.Error as error:
            raise unusable(path, error) from error

    def facts(self, after: int = 0, limit: int | None = None, kinds: Collection[Kind] | None = None) -> Iterator[Fact]:
        """At most `limit` facts with numbers above `after`, in order; `kinds` None: of all kinds."""
        left = limit
        while left is None or left > 0:
            page = self._page(after, PAGE if left is None else min(PAGE, left), kinds)
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].number
            left = left and left - len(page)

    def _page(self, after: int, count: int, kinds: Collection[Kind] | None) -> list[Fact]:
        chosen = f" AND kind IN ({','.join('?' * len(kinds))})" if kinds is not None else ""
        rows = self._reading.execute(
            f"SELECT * FROM facts WHERE number > ?{chosen} ORDER BY number LIMIT ?", (after, *(kinds or ()), count)
        )
        return [fact_of(row) for row in rows]

    def last(self) -> int:
        """Number of the newest fact; 0 if there is none."""
        return last_number(self._reading)

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

    def samples(self, after: int, before: float, count: int) -> list[tuple[int, float, str]]:
        """Number, time and site of the next samples, up to the first one that is not older than `before`."""
        rows = self._reading.execute(
            "SELECT number, time, node FROM facts WHERE kind = 'sample' AND number > ? ORDER BY number LIMIT ?",
            (after, count),
        ).fetchall()
        young = next((index for index, row in enumerate(rows) if row["time"] >= before), len(rows))
        return [(row["number"], row["time"], row["node"]) for row in rows[:young]]

    def stop_reading(self) -> None:
        """Close the connection."""
        self._reading.close()


def facts_after(connection: sqlite3.Connection, number: int) -> Iterator[Fact]:
    """All facts with a greater number, in order."""
    return map(fact_of, connection.execute("SELECT * FROM facts WHERE number > ? ORDER BY number", (number,)))


def lasting_facts(connection: sqlite3.Connection, before: int) -> Iterator[Fact]:
    """The facts below a number that are needed to understand later ones: run and sites, in order."""
    kinds = "('run', 'site')"
    rows = connection.execute(f"SELECT * FROM facts WHERE number < ? AND kind IN {kinds} ORDER BY number", (before,))
    return map(fact_of, rows)


def last_number(connection: sqlite3.Connection) -> int:
    """Number of the newest fact that the database ever had; 0 if it never had one."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'facts'").fetchone()
    return int(row[0]) if row else 0


def unusable(path: Path, error: Exception) -> PierError:
    """The error to show for a database that cannot be used."""
    return PierError(
        f"{path}: {error}",
        "Make sure that the folder is there, that the disk is not full, and that this user may write to it; "
        "if the file is broken, restore it from a backup.",
    )
