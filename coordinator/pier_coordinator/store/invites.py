"""Invites are made, used up and taken back: what happens in the database then."""

from __future__ import annotations

from pier_coordinator.store.refusals import Refused
from pier_coordinator.store.rows import InviteRow, event
from pier_coordinator.store.writer import Transaction

OPEN_INVITES = 256
"""Most invites that somebody can still use: TLS looks at all of their certificates for each new connection."""


def add(transaction: Transaction, invite: InviteRow) -> None:
    """Make an invite. Raises Refused: too many are open, or one for a site of that name."""
    rows = transaction.execute("SELECT * FROM invites WHERE revoked = 0 AND uses_left > 0")
    opened = [other for other in map(InviteRow.of, rows) if not other.closed(invite.created)]
    if len(opened) >= OPEN_INVITES:
        raise Refused(f"{OPEN_INVITES} invites are open: revoke some, or make one with more uses (--uses)")
    for other in opened:
        if invite.name and other.name == invite.name:  # the second to use one would be refused, and only then
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


def revoke(transaction: Transaction, invite: str, now: float) -> InviteRow:
    """Take an invite back. Raises Refused."""
    _find(transaction, invite)
    transaction.execute("UPDATE invites SET revoked = 1 WHERE id = ?", invite)
    transaction.add([event(now, f"invite {invite} was revoked")])
    return _find(transaction, invite)


def end(transaction: Transaction, invite: str, site: str, now: float) -> None:
    """Take an invite back because a site that came with it was revoked, if it can still be used."""
    row = transaction.one("SELECT * FROM invites WHERE id = ?", invite)
    if row is not None and not InviteRow.of(row).closed(now):
        transaction.execute("UPDATE invites SET revoked = 1 WHERE id = ?", invite)
        transaction.add([event(now, f"invite {invite} was revoked with {site}, which came in with it", level=30)])


def use(transaction: Transaction, invite: str, now: float, free: bool = False) -> InviteRow:
    """Count a use, unless it is `free`; returns the invite as it was. Raises Refused: it is open no more."""
    found = _find(transaction, invite)
    if why := found.closed(now):
        raise Refused(f"this invite {why}: ask the run's operator for a new one (pier-coordinator invite)")
    if not free:
        transaction.execute("UPDATE invites SET uses_left = uses_left - 1 WHERE id = ?", invite)
    return found


def _find(transaction: Transaction, invite: str) -> InviteRow:
    row = transaction.one("SELECT * FROM invites WHERE id = ?", invite)
    if row is None:
        raise Refused(f"there is no invite {invite}: pier-coordinator events names those that were made")
    return InviteRow.of(row)
