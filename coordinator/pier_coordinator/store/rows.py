"""The rows of the tables as Python objects."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pier_coordinator.store.facts import Fact

Activity = Literal["train", "pause", "stop"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
REPLICA: dict[str, Any] = {"replica": {}}
"""The default assignment of a site, in the JSON form of the Assignment message."""


@dataclass(frozen=True)
class SiteRow:
    """An enrolled site.

    Attributes:
        enrolled_at, revoked_at: seconds since the epoch.
        invite: id of the invite that it joined with.
        slot: None before it registers; not yet reduced modulo the run's number of sites.
        lease: of its last start; empty before it registers.
        gone: its lease has expired, or it has none.
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
        """Build it from a database row."""
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
        """Build it from a database row."""
        return cls(**{**dict(row), "revoked": bool(row["revoked"])})

    def closed(self, now: float) -> str:
        """Why it can no longer be used, as the end of a sentence; "" while it is open."""
        if self.revoked:
            return "was revoked"
        if now >= self.expires:
            return "has expired"
        return "" if self.uses_left > 0 else "was used already"


@dataclass(frozen=True)
class OrderRow:
    """An order to a site; `assignment` is the JSON form of the Assignment message."""

    node: str
    epoch: int
    activity: Activity
    assignment: dict[str, Any]

    @classmethod
    def of(cls, row: sqlite3.Row) -> OrderRow:
        """Build it from a database row."""
        return cls(row["node"], row["epoch"], row["activity"], json.loads(row["assignment"]))

    def fact(self, now: float, said: str) -> Fact:
        """The fact that the order was given; `said` is the order in words."""
        body = {"epoch": self.epoch, "activity": self.activity, "assignment": next(iter(self.assignment)), "text": said}
        return Fact(now, "order", self.node, body)


@dataclass(frozen=True)
class Registration:
    """What a site says about itself when it starts; an empty name keeps the one it has."""

    name: str
    address: str
    transport: str
    version: str
    workers: int
    lease: bytes = field(repr=False)


@dataclass(frozen=True)
class Standing:
    """A site of the run and its newest order; `founder` is the node that begins the run with the initial weights."""

    site: SiteRow
    order: OrderRow
    founder: str
