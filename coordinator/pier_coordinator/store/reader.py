"""Reading the database: by the coordinator, and by commands while it runs. Readers and writer need not wait."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

from pier_coordinator.store.experts import JobRow, newest
from pier_coordinator.store.facts import Fact, Kind
from pier_coordinator.store.rows import InviteRow, OrderRow, SiteRow, fact_of
from pier_node.base.errors import PierError

PAGE = 1000
"""Facts read at a time: no reader keeps the writer's log from being tidied up for long."""


class Reader:
    """Sees what is committed; to be used by the thread that made it."""

    def __init__(self, path: Path) -> None:
        """Raises PierError."""
        try:
            self._reading = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            self._reading.row_factory = sqlite3.Row
            self._reading.execute("SELECT 1 FROM facts LIMIT 1")
        except sqlite3.Error as error:
            raise unusable(path, error) from error

    def facts(self, after: int = 0, limit: int | None = None, kinds: Collection[Kind] | None = None) -> Iterator[Fact]:
        """At most `limit` facts with numbers above `after`, of some kinds or of all, in order."""
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
        """Number of the newest fact; 0: there is none."""
        return last_number(self._reading)

    def sites(self) -> list[SiteRow]:
        """All sites that were ever let in, in the order in which they were."""
        return [SiteRow.of(row) for row in self._reading.execute("SELECT * FROM sites ORDER BY enrolled_at, node")]

    def revoked(self) -> list[str]:
        """Node ids of the sites that were revoked, the latest last."""
        rows = self._reading.execute("SELECT node FROM sites WHERE revoked_at IS NOT NULL ORDER BY revoked_at, node")
        return [str(row["node"]) for row in rows]

    def invites(self) -> list[InviteRow]:
        """All invites, the newest first."""
        return [InviteRow.of(row) for row in self._reading.execute("SELECT * FROM invites ORDER BY created DESC, id")]

    def orders(self) -> list[OrderRow]:
        """The newest order of each site."""
        return [OrderRow.of(row) for row in self._reading.execute("SELECT * FROM orders ORDER BY node")]

    def experts(self) -> tuple[float, str, list[JobRow]] | None:
        """The plan of experts that holds: see store/experts.py."""
        return newest(self._reading)

    def meta(self, key: str) -> str | None:
        """A value kept under a key."""
        row = self._reading.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def samples(self, after: int, before: float, count: int) -> list[tuple[int, float, str]]:
        """Number, time and site of the next samples; they end at the first that is not older than `before`."""
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
    """All facts above a number, in order."""
    return map(fact_of, connection.execute("SELECT * FROM facts WHERE number > ? ORDER BY number", (number,)))


def lasting_facts(connection: sqlite3.Connection, before: int) -> Iterator[Fact]:
    """Those below a number without which later ones are not understood: the run, its sites, its plans, in order."""
    kinds = "('run', 'site', 'plan')"
    rows = connection.execute(f"SELECT * FROM facts WHERE number < ? AND kind IN {kinds} ORDER BY number", (before,))
    return map(fact_of, rows)


def last_number(connection: sqlite3.Connection) -> int:
    """Number of the newest fact that a database ever had; 0: it had none."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'facts'").fetchone()
    return int(row[0]) if row else 0


def unusable(path: Path, error: Exception) -> PierError:
    """What to tell people about a database that cannot be used."""
    return PierError(
        f"{path}: {error}",
        "Make sure that the folder is there, that the disk is not full, and that this user may write to it; "
        "if the file is broken, restore it from a backup.",
    )
