"""Keeps the event log level with the database, through crashes and while the disk takes no line."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from pier_coordinator.facts import Fact
from pier_coordinator.store.log import EventLog
from pier_coordinator.store.reader import facts_after, last_number, lasting_facts
from pier_coordinator.store.rows import insert

log = logging.getLogger(__name__)


class LogKeeper:
    """Opens the log of a database and brings the two level: each gets what only the other has.

    The database lacks the newest lines after a power cut; the log, when the process died between the two.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Raises OSError, ValueError (a line in the middle of the log is none), sqlite3.Error."""
        self._connection = connection
        self._path = path
        self._log: EventLog | None = self._opened()
        self._adopt(self._log)

    def write(self, facts: list[Fact]) -> None:
        """Add facts that were just committed. What the disk refuses now is tried again with the next ones."""
        try:
            if self._log is None:
                self._log = self._opened()
            else:
                if self._log.full:
                    self._log.turn()
                    self._log.append(lasting_facts(self._connection, before=facts[0].number))
                self._log.append(facts)
        except (OSError, ValueError) as error:
            log.error("%s: %s; the database goes on without it", self._path, error)
            self.close()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
        self._log = None

    def _opened(self) -> EventLog:
        opened = EventLog(self._path)
        opened.append(facts_after(self._connection, opened.last))
        return opened

    def _adopt(self, opened: EventLog) -> None:
        known = last_number(self._connection)
        if opened.last <= known:
            return
        self._connection.execute("BEGIN IMMEDIATE")
        insert(self._connection, opened.after(known))
        self._connection.execute("COMMIT")
        log.warning("%s: %d facts were in the log only, and are back", self._path, opened.last - known)
