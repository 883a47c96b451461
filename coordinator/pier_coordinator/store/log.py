"""The event log: a file with one line per fact, in order, for people and against power cuts.

A fact is first committed to the database; its line is written before anyone is told of the fact. If a crash leaves the
database and the log different, each gets at the next start what only the other has. A line that the disk refuses is
written again with the next facts. When the log reaches LIMIT bytes it is rotated: it replaces the log rotated before,
and a new one begins with the facts that are needed to understand later ones. A beginning that a crash cut off is
written again.
"""

from __future__ import annotations

import logging
import mmap
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from pier_coordinator.store.facts import Fact, facts_after, insert, last_number, lasting_facts

LIMIT = 1 << 30
"""Bytes: some months of a run of three sites, four hours of a run of a thousand sites."""


def put_aside(path: Path) -> Path:
    """Path of the previous log, if there is one: events.1.jsonl beside events.jsonl."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class EventLog:
    """An open log.

    Attributes:
        last: number of the last fact in the log; 0: it is empty.
        begun: whether it has what it begins with after a rotation.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the log, and cut off a last line that a crash left incomplete. Raises OSError."""
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        before = _mend(put_aside(path)) if put_aside(path).exists() else 0
        self.last = max(_mend(path), before)
        self.begun = self.last > before
        if not self.begun:
            self._file.truncate(0)

    @property
    def full(self) -> bool:
        """Whether the log has reached LIMIT and must be rotated."""
        return self._file.tell() >= LIMIT

    def rotate(self) -> None:
        """Rotate: put this log aside and begin a new one. Raises OSError."""
        self._path.rename(put_aside(self._path))
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self.begun = False

    def append(self, facts: Iterable[Fact]) -> None:
        """Write lines to the operating system, which keeps them if this process dies. Raises OSError."""
        last = self.last
        lines = []
        for fact in facts:
            lines.append(f"{fact.line()}\n")
            last = max(last, fact.number)
        left = "".join(lines).encode()
        while left:
            left = left[self._file.write(left) :]
        self.last = last

    def after(self, number: int) -> Iterator[Fact]:
        """The facts with a number greater than this one, of the log put aside and this. Raises OSError, ValueError."""
        for path in filter(Path.exists, (put_aside(self._path), self._path)):
            with path.open("rb") as file:
                for line in file:
                    fact = Fact.parse(line.decode())
                    if fact.number > number:
                        number = fact.number
                        yield fact

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _mend(path: Path) -> int:
    """Cut a file after its last complete line; return the number of that line's fact."""
    if not path.stat().st_size:
        return 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as text:
        end = len(text)
        while end:
            start = text.rfind(b"\n", 0, end - 1) + 1
            if text[end - 1 : end] == b"\n" and (number := _number(text[start:end])):
                break
            end = start
        else:
            number = 0
        size = len(text)
    if end < size:
        with path.open("r+b") as file:
            file.truncate(end)
    return number


def _number(line: bytes) -> int:
    try:
        return Fact.parse(line.decode()).number
    except ValueError:
        return 0


log = logging.getLogger(__name__)


class LogWriter:
    """Opens the log of a database and synchronises them: each gets what only the other has.

    The database lacks the newest lines after a power cut. The log lacks them if the process died between the commit and
    the write.

    Attributes:
        problem: why the last lines could not be written; "" if they were.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Raises OSError, ValueError (a line in the middle of the log is invalid), sqlite3.Error."""
        self._connection = connection
        self._path = path
        self.problem = ""
        self._log: EventLog | None = self._opened()

    def write(self, facts: list[Fact]) -> None:
        """Add facts that were just committed. Facts that the disk refuses now are written with the next ones."""
        try:
            if self._log is None:
                self._log = self._opened()
            else:
                if self._log.full:
                    self._log.rotate()
                self._append(self._log, facts)
            self.problem = ""
        except (OSError, ValueError) as error:
            if not self.problem:
                log.error("%s: %s; the database continues without it", self._path, error)
            self.problem = f"{self._path.name}: {getattr(error, 'strerror', None) or error}"
            self.close()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
        self._log = None

    def _opened(self) -> EventLog:
        opened = EventLog(self._path)
        self._adopt(opened)
        self._append(opened, facts_after(self._connection, opened.last))
        return opened

    def _append(self, opened: EventLog, facts: Iterable[Fact]) -> None:
        if not opened.begun:
            facts = chain(lasting_facts(self._connection, before=opened.last + 1), facts)
        opened.append(facts)
        opened.begun = True

    def _adopt(self, opened: EventLog) -> None:
        known = last_number(self._connection)
        if opened.last <= known:
            return
        self._connection.execute("BEGIN IMMEDIATE")
        insert(self._connection, opened.after(known))
        self._connection.execute("COMMIT")
        log.warning("%s: %d facts were in the log only, and are back", self._path, opened.last - known)
