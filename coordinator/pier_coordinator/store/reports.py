"""Stores the reports of sites, each record once: a site numbers the records of a stream from 0 and may resend them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pier_coordinator.store.facts import Fact
from pier_coordinator.store.writer import Transaction

STREAMS = 16
"""Number of streams remembered per site, one per start. Older ones have ended, and nothing of them is sent again."""


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


def take(transaction: Transaction, report: Report, now: float) -> int:
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
        _forget_old(transaction, report.node)
    if row is None or stored > known or report.dropped > dropped:
        transaction.execute(
            "INSERT INTO streams (node, stream, stored, dropped) VALUES (?, ?, ?, ?) ON CONFLICT (node, stream)"
            " DO UPDATE SET stored = excluded.stored, dropped = max(dropped, excluded.dropped)",
            *(report.node, report.stream, stored, report.dropped),
        )
    return int(stored)


def _forget_old(transaction: Transaction, node: str) -> None:
    transaction.execute(
        "DELETE FROM streams WHERE number IN"
        " (SELECT number FROM streams WHERE node = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
        *(node, STREAMS - 1),
    )
