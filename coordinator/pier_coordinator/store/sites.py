"""Database operations on sites: enrol, register, note presence and revoke. Each is part of one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict

from pier_coordinator.store.facts import Fact
from pier_coordinator.store.invites import end, use
from pier_coordinator.store.orders import get, order_of, put
from pier_coordinator.store.refusals import Refused, Stranger
from pier_coordinator.store.rows import REPLICA, Registration, SiteRow, Standing, event
from pier_coordinator.store.writer import Transaction
from pier_node.config.run import SITES

FOUNDER, ACTIVITY = "founder", "activity"
REVOCATIONS = "revocations"
"""Key of the version of the list of revoked sites: milliseconds since the epoch, or the previous version plus 1 if the
clock was set back. It therefore increases even if the database is restored from a copy."""


def enrol(transaction: Transaction, node: str, name: str, invite: str, now: float) -> Standing:
    """Enrol a site for one use of an invite; a site that is enrolled already stays so, at no cost. Raises Refused."""
    known = find(transaction, node)
    if known and known.revoked_at is not None:
        raise Refused(f"node {node} was revoked: start with an empty data folder and a new invite to join as another")
    if known:
        if known.invite != invite:
            use(transaction, invite, now, free=True)
        return _standing(transaction, node)
    offered = use(transaction, invite, now)
    _require_room(transaction)
    site = SiteRow(node, name or offered.name or node, now, invite)
    _free_name(transaction, site.name, node)
    transaction.execute(
        "INSERT INTO sites (node, name, enrolled_at, invite) VALUES (?, ?, ?, ?)", node, site.name, now, invite
    )
    activity = get(transaction, ACTIVITY) or "train"
    transaction.execute("INSERT INTO orders VALUES (?, 1, ?, ?)", node, activity, json.dumps(REPLICA))
    transaction.add([event(now, f"{site.name} was let in with invite {invite}", node)])
    return _standing(transaction, node)


def register(transaction: Transaction, node: str, registration: Registration, now: float) -> Standing:
    """Register a site that starts. Raises Stranger, Refused."""
    site = require(transaction, node)
    name = registration.name or site.name
    _free_name(transaction, name, node)
    slot = _lowest_free_slot(transaction) if site.slot is None else site.slot
    said = {key: value for key, value in asdict(registration).items() if key != "lease"} | {"name": name}
    transaction.execute(
        "UPDATE sites SET name = ?, address = ?, transport = ?, version = ?, workers = ?,"
        " slot = ?, lease = ?, gone = 0 WHERE node = ?",
        *(*said.values(), slot, registration.lease, node),
    )
    if get(transaction, FOUNDER) is None:
        put(transaction, FOUNDER, node)
    if registration.address:  # a site that does not listen yet registers again once it does
        transaction.add([Fact(now, "site", node, said)])
    return _standing(transaction, node)


def revoke(transaction: Transaction, node: str, now: float) -> SiteRow:
    """Revoke a site for good, and the invite that it joined with: that would let the same people in again.

    Raises:
        Stranger: the site is not of the run.
    """
    site = require(transaction, node)
    transaction.execute("UPDATE sites SET revoked_at = ?, gone = 1, lease = x'' WHERE node = ?", now, node)
    put(transaction, REVOCATIONS, str(max(int(get(transaction, REVOCATIONS) or 0) + 1, int(now * 1000))))
    told = {"level": 30, "text": f"{site.name} was revoked", "state": "revoked"}
    transaction.add([Fact(now, "event", node, told)])
    end(transaction, site.invite, site.name, now)
    started = transaction.one("SELECT 1 FROM facts WHERE kind = 'round' LIMIT 1")
    if not started and get(transaction, FOUNDER) == node:  # otherwise no site would ever begin the run
        put(transaction, FOUNDER, None)
    return _found(transaction, node)


def note_presence(transaction: Transaction, gone: bool, events: Iterable[Fact]) -> None:
    """Record that sites went silent or came back, with one event per site."""
    for fact in transaction.add(events):
        transaction.execute("UPDATE sites SET gone = ? WHERE node = ?", gone, fact.node)


def require(transaction: Transaction, node: str) -> SiteRow:
    """The site with this node id, which must be of the run. Raises Stranger."""
    return member(find(transaction, node), node)


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
    return Standing(_found(transaction, node), order_of(transaction, node), str(get(transaction, FOUNDER)))


def _found(transaction: Transaction, node: str) -> SiteRow:
    site = find(transaction, node)
    assert site is not None
    return site


def _require_room(transaction: Transaction) -> None:
    (count,) = _row(transaction, "SELECT count(*) FROM sites WHERE revoked_at IS NULL")
    if count >= SITES:
        raise Refused(f"the run has {SITES} sites, and no more are possible: revoke one that is gone for good")


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


def _row(transaction: Transaction, sql: str) -> sqlite3.Row:
    row = transaction.one(sql)
    assert row is not None
    return row
