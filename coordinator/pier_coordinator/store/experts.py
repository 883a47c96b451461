"""Database operations on the current plan of experts and the state of its jobs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pier_coordinator.store.facts import number, text
from pier_coordinator.store.rows import event
from pier_coordinator.store.writer import Transaction

RESULT = ("name", "loss", "parent_loss", "standard_error", "accepted", "epochs", "flops", "tokens", "seconds")


@dataclass(frozen=True)
class JobRow:
    """A job of the plan.

    Attributes:
        node: node id of the site that trains it or has trained it; "": no site can.
        result: what that site reported when the job was done.
        declined: node ids of the sites that cannot train it.
    """

    number: int
    node: str
    result: dict[str, Any] | None = None
    declined: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: sqlite3.Row) -> JobRow:
        """Build it from a database row."""
        result = json.loads(row["result"]) if row["result"] else None
        return cls(row["number"], row["node"], result, tuple(json.loads(row["declined"])))

    def done(self, body: Mapping[str, Any]) -> JobRow:
        """Return a copy with the result that its site reported for the expert."""
        result: dict[str, Any] = {key: number(body, key) for key in RESULT}
        result |= {"name": text(body, "name"), "accepted": body.get("accepted") is True}
        return replace(self, result={**result, "weights": text(body, "weights")})

    def declined_by(self, node: str) -> JobRow:
        """Return a copy that records that a site cannot train it."""
        return replace(self, result=None, declined=tuple(dict.fromkeys((*self.declined, node))))

    def moved(self, node: str) -> JobRow:
        """Return a copy that another site trains, from the start."""
        return replace(self, node=node, result=None)


def newest(connection: sqlite3.Connection) -> tuple[float, str, list[JobRow]] | None:
    """The newest plan: when it was accepted (seconds since the epoch), its JSON, its jobs. None: there is no plan."""
    plan = connection.execute(
        "SELECT id, accepted_at, plan FROM expert_plans ORDER BY accepted_at DESC, rowid DESC"
    ).fetchone()
    if plan is None:
        return None
    rows = connection.execute("SELECT * FROM expert_jobs WHERE plan = ? ORDER BY number", (plan["id"],))
    return plan["accepted_at"], plan["plan"], [JobRow.of(row) for row in rows]


def accept(transaction: Transaction, plan: str, text: str, jobs: Iterable[JobRow], now: float) -> None:
    """Make this the current plan. Accepting the same plan again restarts it."""
    transaction.execute("INSERT OR REPLACE INTO expert_plans VALUES (?, ?, ?)", plan, now, text)
    transaction.execute("DELETE FROM expert_jobs WHERE plan = ?", plan)
    put(transaction, plan, jobs)
    transaction.add([event(now, f"the plan {plan[:8]} of experts was accepted")])


def put(transaction: Transaction, plan: str, jobs: Iterable[JobRow]) -> None:
    """Store the current state of these jobs."""
    for job in jobs:
        values = (job.number, job.node, json.dumps(job.result) if job.result else None, json.dumps(job.declined))
        transaction.execute("INSERT OR REPLACE INTO expert_jobs VALUES (?, ?, ?, ?, ?)", plan, *values)
