"""Database operations on invites: make, use and revoke them."""

from __future__ import annotations

from collections.abc import Iterable

from pier_coordinator.store.refusals import Refused
from pier_coordinator.store.rows import InviteRow, event
from pier_coordinator.store.writer import Transaction

OPEN_INVITES = 256
"""Maximum number of open invites: TLS checks all of their certificates at each new connection."""


def trusted(invites: Iterable[InviteRow], now: float) -> tuple[InviteRow, ...]:
    """The invites whose holders TLS accepts: the open ones, then the newest closed ones, to tell them what is wrong."""
    ordered = sorted(invites, key=lambda invite: (bool(invite.closed(now)), -invite.created))
    return tuple(ordered[:OPEN_INVITES])


def add(transaction: Transaction, invite: InviteRow) -> None:
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


def revoke(transaction: Transaction, invite: str, now: float) -> InviteRow:
    """Revoke an invite. Raises Refused."""
    _find(transaction, invite)
    transaction.execute("UPDATE invites SET revoked = 1 WHERE id = ?", invite)
    transaction.add([event(now, f"invite {invite} was revoked")])
    return _find(transaction, invite)


def end(transaction: Transaction, invite: str, site: str, now: float) -> None:
    """Revoke an invite, if it is still open, because a site that joined with it was revoked."""
    row = transaction.one("SELECT * FROM invites WHERE id = ?", invite)
    if row is not None and not InviteRow.of(row).closed(now):
        transaction.execute("UPDATE invites SET revoked = 1 WHERE id = ?", invite)
        transaction.add([event(now, f"invite {invite} was revoked with {site}, which came in with it", level=30)])


def use(transaction: Transaction, invite: str, now: float, free: bool = False) -> InviteRow:
    """Count a use, unless it is `free`; return the invite as it was before. Raises Refused: it is no longer open."""
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
