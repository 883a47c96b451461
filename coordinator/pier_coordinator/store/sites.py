"""Database operations on sites, their invites, orders and reports, and on single values stored under a key.

Each operation is part of one transaction. An order tells a site what to do; its epoch increases whenever it changes.
The single values are, for instance, the run's configuration and its founder. Each record of a report is stored once: a
site numbers the records of a stream from 0 and may resend them.

A request that must be refused raises Refused: every message says what is wrong and what to do next.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pier_coordinator.store.facts import Fact, event
from pier_coordinator.store.snapshots import number_of
from pier_coordinator.store.writer import Transaction
from pier_node.config.run import SITES


class Refused(Exception):
    """The request is not possible in the current state: something must be changed first."""


class Stranger(Exception):
    """The caller does not, or no longer, belong to the run."""


class Unregistered(Exception):
    """The caller belongs to the run but has no lease: it must register."""


class Superseded(Exception):
    """The same site has been started again and has registered since."""


class WrongClock(Exception):
    """The caller's clock and the coordinator's differ too much, whichever is wrong; it may retry once they agree."""


class TooFast(Exception):
    """The caller has exceeded its rate limit, or another such call of it is under way; it may retry after `seconds`."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


Activity = Literal["train", "pause", "stop"]
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


FOUNDER, ACTIVITY = "founder", "activity"
WITNESS = "witness"
"""Key that is there once the witness was asked."""
REVOCATIONS = "revocations"
"""Key of the version of the list of revoked sites: milliseconds since the epoch, or the previous version plus 1 if the
clock was set back. It therefore increases even if the database is restored from a copy."""
OPEN_INVITES = 256
"""Maximum number of open invites: TLS checks all of their certificates at each new connection."""
SAID: dict[Activity, str] = {"train": "resumed", "pause": "paused", "stop": "stopped"}
OPERATOR = "the operator"
STREAMS = 16
"""Number of streams remembered per site, one per start. Older ones have ended, and nothing of them is sent again."""


def enrol(transaction: Transaction, node: str, name: str, invite: str, now: float) -> Standing:
    """Enrol a site for one use of an invite; a site that is enrolled already stays so, at no cost. Raises Refused."""
    known = find(transaction, node)
    if known and known.revoked_at is not None:
        raise Refused(f"node {node} was revoked: start with an empty data folder and a new invite to join as another")
    if known:
        if known.invite != invite:
            use_invite(transaction, invite, now, free=True)
        return _standing(transaction, node)
    offered = use_invite(transaction, invite, now)
    count = transaction.execute("SELECT count(*) FROM sites WHERE revoked_at IS NULL").fetchone()[0]
    if count >= SITES:
        raise Refused(f"the run has {SITES} sites, and no more are possible: revoke one that is gone for good")
    site = SiteRow(node, name or offered.name or node, now, invite)
    _free_name(transaction, site.name, node)
    transaction.execute(
        "INSERT INTO sites (node, name, enrolled_at, invite) VALUES (?, ?, ?, ?)", node, site.name, now, invite
    )
    activity = get_meta(transaction, ACTIVITY) or "train"
    transaction.execute("INSERT INTO orders VALUES (?, 1, ?, ?)", node, activity, json.dumps(REPLICA))
    transaction.add([event(now, f"{site.name} was let in with invite {invite}", node)])
    return _standing(transaction, node)


def register(transaction: Transaction, node: str, registration: Registration, now: float) -> Standing:
    """Register a site that starts. Raises Stranger, Refused."""
    site = member(find(transaction, node), node)
    name = registration.name or site.name
    _free_name(transaction, name, node)
    slot = _lowest_free_slot(transaction) if site.slot is None else site.slot
    said = {key: value for key, value in asdict(registration).items() if key != "lease"} | {"name": name}
    transaction.execute(
        "UPDATE sites SET name = ?, address = ?, transport = ?, version = ?, workers = ?,"
        " slot = ?, lease = ?, gone = 0 WHERE node = ?",
        *(*said.values(), slot, registration.lease, node),
    )
    if get_meta(transaction, FOUNDER) is None:
        put_meta(transaction, FOUNDER, node)
    if registration.address:  # a site that does not listen yet registers again once it does
        transaction.add([Fact(now, "site", node, said)])
    return _standing(transaction, node)


def revoke(transaction: Transaction, node: str, now: float) -> SiteRow:
    """Revoke a site for good, and the invite that it joined with: that would let the same people in again.

    Raises:
        Stranger: the site is not of the run.
    """
    site = member(find(transaction, node), node)
    transaction.execute("UPDATE sites SET revoked_at = ?, gone = 1, lease = x'' WHERE node = ?", now, node)
    put_meta(transaction, REVOCATIONS, str(max(int(get_meta(transaction, REVOCATIONS) or 0) + 1, int(now * 1000))))
    transaction.add([event(now, f"{site.name} was revoked", node, level=30, state="revoked")])
    end_invite(transaction, site.invite, site.name, now)
    started = number_of(transaction.connection) or transaction.one("SELECT 1 FROM facts WHERE kind = 'round' LIMIT 1")
    if not started and get_meta(transaction, FOUNDER) == node:  # otherwise no site would ever begin the run
        put_meta(transaction, FOUNDER, None)
    return _found(transaction, node)


def note_presence(transaction: Transaction, noted: Collection[tuple[bool, Fact]]) -> None:
    """Record for each of these events, at most one per site, whether its site is gone."""
    transaction.add(fact for _, fact in noted)
    for gone, fact in noted:
        transaction.execute("UPDATE sites SET gone = ? WHERE node = ?", gone, fact.node)


def member(site: SiteRow | None, node: str) -> SiteRow:
    """The site, if it is of the run. Raises Stranger."""
    if site is None:
        raise Stranger(f"node {node} is not of this run: ask its operator for an invite (pier-coordinator invite)")
    if site.revoked_at is not None:
        raise Stranger(f"node {node} was revoked by the run's operator")
    return site


def find(transaction: Transaction, node: str) -> SiteRow | None:
    """The site with this node id, if it was ever enrolled."""
    row = transaction.one("SELECT * FROM sites WHERE node = ?", node)
    return SiteRow.of(row) if row else None


def _standing(transaction: Transaction, node: str) -> Standing:
    order = transaction.one("SELECT * FROM orders WHERE node = ?", node)
    assert order is not None
    return Standing(_found(transaction, node), OrderRow.of(order), str(get_meta(transaction, FOUNDER)))


def _found(transaction: Transaction, node: str) -> SiteRow:
    site = find(transaction, node)
    assert site is not None
    return site


def _free_name(transaction: Transaction, name: str, node: str) -> None:
    other = transaction.one("SELECT node FROM sites WHERE name = ? AND node <> ? AND revoked_at IS NULL", name, node)
    if other:
        raise Refused(
            f"another site, node {other['node']}, is called {name} already: start with another --name, "
            f"or, if that one is gone for good, revoke it first (pier-coordinator revoke {name})"
        )


def _lowest_free_slot(transaction: Transaction) -> int:
    rows = transaction.execute("SELECT slot FROM sites WHERE revoked_at IS NULL AND slot IS NOT NULL")
    taken = {row["slot"] for row in rows}
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def trusted(invites: Iterable[InviteRow], now: float) -> tuple[InviteRow, ...]:
    """The invites whose holders TLS accepts: the open ones, then the newest closed ones, to tell them what is wrong."""
    ordered = sorted(invites, key=lambda invite: (bool(invite.closed(now)), -invite.created))
    return tuple(ordered[:OPEN_INVITES])


def add_invite(transaction: Transaction, invite: InviteRow) -> None:
    """Make an invite. Raises Refused: too many invites are open, or one for a site of this name is."""
    rows = transaction.execute("SELECT * FROM invites WHERE revoked = 0 AND uses_left > 0")
    opened = [other for other in map(InviteRow.of, rows) if not other.closed(invite.created)]
    if len(opened) >= OPEN_INVITES:
        raise Refused(f"{OPEN_INVITES} invites are open: revoke some, or make one with more uses (--uses)")
    for other in opened:
        if invite.name and other.name == invite.name:  # otherwise the second site would be refused only when it enrols
            raise Refused(
                f"an invite for {invite.name} is open already: give another --name, "
                f"or take that one back first (pier-coordinator revoke {other.id})"
            )
    values = (invite.id, invite.name, invite.expires, invite.uses_left, invite.certificate, invite.created)
    transaction.execute(
        "INSERT INTO invites (id, name, expires, uses_left, certificate, created) VALUES (?, ?, ?, ?, ?, ?)", *values
    )
    whom = f" for {invite.name}" if invite.name else ""
    transaction.add([event(invite.created, f"invite {invite.id} was made{whom}")])


def revoke_invite(transaction: Transaction, invite: str, now: float) -> InviteRow:
    """Revoke an invite. Raises Refused."""
    _invite(transaction, invite)
    transaction.execute("UPDATE invites SET revoked = 1 WHERE id = ?", invite)
    transaction.add([event(now, f"invite {invite} was revoked")])
    return _invite(transaction, invite)


def end_invite(transaction: Transaction, invite: str, site: str, now: float) -> None:
    """Revoke an invite, if it is still open, because a site that joined with it was revoked."""
    row = transaction.one("SELECT * FROM invites WHERE id = ?", invite)
    if row is not None and not InviteRow.of(row).closed(now):
        transaction.execute("UPDATE invites SET revoked = 1 WHERE id = ?", invite)
        transaction.add([event(now, f"invite {invite} was revoked with {site}, which came in with it", level=30)])


def use_invite(transaction: Transaction, invite: str, now: float, free: bool = False) -> InviteRow:
    """Count a use, unless it is `free`; return the invite as it was before. Raises Refused: it is no longer open."""
    found = _invite(transaction, invite)
    if why := found.closed(now):
        raise Refused(f"this invite {why}")
    if not free:
        transaction.execute("UPDATE invites SET uses_left = uses_left - 1 WHERE id = ?", invite)
    return found


def _invite(transaction: Transaction, invite: str) -> InviteRow:
    row = transaction.one("SELECT * FROM invites WHERE id = ?", invite)
    if row is None:
        raise Refused(f"there is no invite {invite}: pier-coordinator events names those that were made")
    return InviteRow.of(row)


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
        put_meta(transaction, ACTIVITY, activity)
    rows = transaction.execute(
        "UPDATE orders SET epoch = epoch + 1, activity = coalesce(?, activity), assignment = coalesce(?, assignment)"
        " WHERE node IN (SELECT node FROM sites WHERE revoked_at IS NULL)"
        " AND (? IS NULL OR node IN (SELECT value FROM json_each(?))) RETURNING *",
        *(activity, assignment and json.dumps(assignment)),
        *[None if nodes is None else json.dumps(sorted(nodes))] * 2,
    )
    orders = [OrderRow.of(row) for row in rows.fetchall()]
    said = SAID[activity] if activity else f"assigned {next(iter(assignment or {}), '')}"
    transaction.add(order.fact(now, f"{said} by {by}") for order in orders)
    return orders


@dataclass(frozen=True)
class Report:
    """Records `first`, `first` + 1, ... of a stream.

    Attributes:
        dropped: total number of records that the stream lost before they could be delivered.
    """

    node: str
    stream: bytes = field(repr=False)
    first: int
    facts: Sequence[Fact]
    dropped: int = 0


def take_report(transaction: Transaction, report: Report, now: float) -> int:
    """Store the new records of a report. All records of the stream below the returned number are stored or lost."""
    row = transaction.one(
        "SELECT stored, dropped FROM streams WHERE node = ? AND stream = ?", report.node, report.stream
    )
    known, dropped = (row["stored"], row["dropped"]) if row else (0, 0)
    transaction.add(report.facts[max(known - report.first, 0) :])
    stored = max(known, report.first + len(report.facts))
    if report.dropped > dropped:
        text = f"{report.dropped - dropped} records of this site are lost: it could not hand them over for too long"
        lost = {"level": 30, "text": text, "dropped": report.dropped}
        transaction.add([Fact(now, "event", report.node, lost)])
    if row is None:
        transaction.execute(
            "DELETE FROM streams WHERE number IN"
            " (SELECT number FROM streams WHERE node = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
            *(report.node, STREAMS - 1),
        )
    if row is None or stored > known or report.dropped > dropped:
        transaction.execute(
            "INSERT INTO streams (node, stream, stored, dropped) VALUES (?, ?, ?, ?) ON CONFLICT (node, stream)"
            " DO UPDATE SET stored = excluded.stored, dropped = max(dropped, excluded.dropped)",
            *(report.node, report.stream, stored, report.dropped),
        )
    return int(stored)


def get_meta(transaction: Transaction, key: str) -> str | None:
    """The value stored under a key; None if there is none."""
    row = transaction.one("SELECT value FROM meta WHERE key = ?", key)
    return None if row is None else str(row["value"])


def put_meta(transaction: Transaction, key: str, value: str | None) -> None:
    """Store a value under a key; None deletes it."""
    if value is None:
        transaction.execute("DELETE FROM meta WHERE key = ?", key)
    else:
        transaction.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)
