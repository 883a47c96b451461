"""What each site shall do: an order's epoch grows whenever that changes.

Single values by their keys: the run's configuration, its founder.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pier_coordinator.store.rows import Activity, OrderRow
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


SAID: dict[Activity, str] = {"train": "resumed", "pause": "paused", "stop": "stopped"}
OPERATOR = "the operator"


def order_of(transaction: Transaction, node: str) -> OrderRow:
    """The newest order of a site that was let in."""
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
    """Order sites of the run, or all; None: that part stays. An activity for all holds for sites to come as well.

    Args:
        by: whose will it is, for the event.
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
