"""Single values by their keys: the run's configuration, its founder."""

from __future__ import annotations

from pier_coordinator.store.writer import Transaction


def get(transaction: Transaction, key: str) -> str | None:
    """The value of a key, if it has one."""
    row = transaction.one("SELECT value FROM meta WHERE key = ?", key)
    return None if row is None else str(row["value"])


def put(transaction: Transaction, key: str, value: str | None) -> None:
    """Give a key a value, or take it away."""
    if value is None:
        transaction.execute("DELETE FROM meta WHERE key = ?", key)
    else:
        transaction.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)
