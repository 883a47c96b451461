"""Database operations on orders, which tell each site what to do, and on single values stored under a key.

An order's epoch increases whenever the order changes. The single values are, for instance, the run's configuration and
its founder.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pier_coordinator.store.rows import Activity, OrderRow
from pier_coordinator.store.writer import Transaction


def get(transaction: Transaction, key: str) -> str | None:
    """The value stored under a key; None if there is none."""
    row = transaction.one("SELECT value FROM meta WHERE key = ?", key)
    return None if row is None else str(row["value"])


def put(transaction: Transaction, key: str, value: str | None) -> None:
    """Store a value under a key; None deletes it."""
    if value is None:
        transaction.execute("DELETE FROM meta WHERE key = ?", key)
    else:
        transaction.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)


SAID: dict[Activity, str] = {"train": "resumed", "pause": "paused", "stop": "stopped"}
OPERATOR = "the operator"


def order_of(transaction: Transaction, node: str) -> OrderRow:
    """The newest order to an enrolled site."""
    row = transaction.one("SELECT * FROM orders WHERE node = ?", node)
    assert row is not None
    return OrderRow.of(row)


def set_order(
    transaction: Transaction,
    nodes: Collection[str] | None,
    activity: Activity | None,
    assignment: dict[str, Any] | None,
    now: float,
    by: str = OPERATOR,
) -> list[OrderRow]:
    """Give orders to some sites of the run, or to all; return the new orders.

    Args:
        nodes: the sites; None: all of them. An activity for all also applies to sites that join later.
        activity: None: it stays as it is.
        assignment: None: it stays as it is.
        by: who gives the order, for the fact.
    """
    if nodes is None and activity is not None:
        put(transaction, "activity", activity)
    rows = transaction.execute(
        "UPDATE orders SET epoch = epoch + 1, activity = coalesce(?, activity), assignment = coalesce(?, assignment)"
        " WHERE node IN (SELECT node FROM sites WHERE revoked_at IS NULL)"
        " AND (? IS NULL OR node IN (SELECT value FROM json_each(?))) RETURNING *",
        *(activity, assignment and json.dumps(assignment)),
        *[None if nodes is None else json.dumps(sorted(nodes))] * 2,
    )
    orders = [OrderRow.of(row) for row in rows.fetchall()]
    transaction.add(order.fact(now, f"{_said(activity, order)} by {by}") for order in orders)
    return orders


def _said(activity: Activity | None, order: OrderRow) -> str:
    return f"assigned {next(iter(order.assignment))}" if activity is None else SAID[activity]
