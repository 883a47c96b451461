"""The experts' plan that holds, and how far its jobs are: what happens in the database."""

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
        node: of the site that trains it, or did; "": none can.
        result: what that site said when it was done.
        declined: nodes that cannot train it.
    """

    number: int
    node: str
    result: dict[str, Any] | None = None
    declined: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: sqlite3.Row) -> JobRow:
        """From its row."""
        result = json.loads(row["result"]) if row["result"] else None
        return cls(row["number"], row["node"], result, tuple(json.loads(row["declined"])))

    def done(self, body: Mapping[str, Any]) -> JobRow:
        """The same with what its site says of the expert."""
        result: dict[str, Any] = {key: number(body, key) for key in RESULT}
        result |= {"name": text(body, "name"), "accepted": body.get("accepted") is True}
        return replace(self, result={**result, "weights": text(body, "weights")})

    def declined_by(self, node: str) -> JobRow:
        """The same, which a site cannot train."""
        return replace(self, result=None, declined=tuple(dict.fromkeys((*self.declined, node))))

    def moved(self, node: str) -> JobRow:
        """The same at another site, from the start."""
        return replace(self, node=node, result=None)


def newest(connection: sqlite3.Connection) -> tuple[float, str, list[JobRow]] | None:
    """When the plan was accepted (seconds since the epoch), its JSON and its jobs; None: no plan ever was."""
    plan = connection.execute(
        "SELECT id, accepted_at, plan FROM expert_plans ORDER BY accepted_at DESC, rowid DESC"
    ).fetchone()
    if plan is None:
        return None
    rows = connection.execute("SELECT * FROM expert_jobs WHERE plan = ? ORDER BY number", (plan["id"],))
    return plan["accepted_at"], plan["plan"], [JobRow.of(row) for row in rows]


def accept(transaction: Transaction, plan: str, text: str, jobs: Iterable[JobRow], now: float) -> None:
    """This plan holds from now on; accepted again, it begins again."""
    transaction.execute("INSERT OR REPLACE INTO expert_plans VALUES (?, ?, ?)", plan, now, text)
    transaction.execute("DELETE FROM expert_jobs WHERE plan = ?", plan)
    put(transaction, plan, jobs)
    transaction.add([event(now, f"the plan {plan[:8]} of experts was accepted")])


def put(transaction: Transaction, plan: str, jobs: Iterable[JobRow]) -> None:
    """How these jobs are now."""
    for job in jobs:
        values = (job.number, job.node, json.dumps(job.result) if job.result else None, json.dumps(job.declined))
        transaction.execute("INSERT OR REPLACE INTO expert_jobs VALUES (?, ?, ?, ?, ?)", plan, *values)
