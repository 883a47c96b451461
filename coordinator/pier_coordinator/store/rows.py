"""What the tables hold, as Python sees it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pier_coordinator.store.facts import Fact

Activity = Literal["train", "pause", "stop"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
REPLICA: dict[str, Any] = {"replica": {}}
"""The assignment that a site has unless told otherwise: the JSON form of the Assignment message."""


@dataclass(frozen=True)
class SiteRow:
    """A site that was let in.

    Attributes:
        enrolled_at, revoked_at: seconds since the epoch.
        invite: id of the one that it came with.
        slot: None before it registers; not yet taken modulo the run's sites.
        lease: of its last start; empty before it registers.
        gone: its lease ran out, or it has none.
    """

    node: str
    name: str
    enrolled_at: float
    invite: str
    revoked_at: float | None = None
    address: str = ""
    slot: int | None = None
    lease: bytes = field(default=b"", repr=False)
    gone: bool = True
    transport: str = ""
    version: str = ""
    workers: int = 0

    @classmethod
    def of(cls, row: sqlite3.Row) -> SiteRow:
        """From its row."""
        return cls(**{**dict(row), "gone": bool(row["gone"])})


@dataclass(frozen=True)
class InviteRow:
    """An invite. `expires` and `created` are seconds since the epoch; `certificate` is PEM."""

    id: str
    name: str | None
    expires: float
    uses_left: int
    certificate: bytes = field(repr=False)
    created: float
    revoked: bool = False

    @classmethod
    def of(cls, row: sqlite3.Row) -> InviteRow:
        """From its row."""
        return cls(**{**dict(row), "revoked": bool(row["revoked"])})

    def closed(self, now: float) -> str:
        """Why nobody can use it any more, as the end of a sentence; "" while it is open."""
        if self.revoked:
            return "was revoked"
        if now >= self.expires:
            return "has expired"
        return "" if self.uses_left > 0 else "was used already"


@dataclass(frozen=True)
class OrderRow:
    """What a site shall do; `assignment` is the JSON form of the message."""

    node: str
    epoch: int
    activity: Activity
    assignment: dict[str, Any]

    @classmethod
    def of(cls, row: sqlite3.Row) -> OrderRow:
        """From its row."""
        return cls(row["node"], row["epoch"], row["activity"], json.loads(row["assignment"]))

    def fact(self, now: float, said: str) -> Fact:
        """That it was given, and in words."""
        body = {"epoch": self.epoch, "activity": self.activity, "assignment": next(iter(self.assignment)), "text": said}
        return Fact(now, "order", self.node, body)


@dataclass(frozen=True)
class Registration:
    """What a site says of itself when it starts; no name: it keeps the one it has."""

    name: str
    address: str
    transport: str
    version: str
    workers: int
    lease: bytes = field(repr=False)


@dataclass(frozen=True)
class Standing:
    """How a site of the run stands; `founder` is the node that begins the run with the initial weights."""

    site: SiteRow
    order: OrderRow
    founder: str


def fact_of(row: sqlite3.Row) -> Fact:
    """A fact from its row."""
    return Fact(row["time"], row["kind"], row["node"], json.loads(row["body"]), row["number"])


def insert(connection: sqlite3.Connection, facts: Iterable[Fact]) -> None:
    """Put numbered facts into their table. Raises sqlite3.Error, ValueError (a number that JSON has not)."""
    rows = ((fact.number, fact.time, fact.kind, fact.node, _body(fact)) for fact in facts)
    connection.executemany("INSERT INTO facts VALUES (?, ?, ?, ?, ?)", rows)


def _body(fact: Fact) -> str:
    return json.dumps(fact.body, separators=(",", ":"), allow_nan=False)


def event(now: float, text: str, node: str = "", level: int = 20) -> Fact:
    """An event, of a site or of none; `level` is of Python's logging."""
    return Fact(now, "event", node, {"level": level, "text": text})
