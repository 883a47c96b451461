"""The one writer: a thread that puts whatever is asked of it meanwhile into one transaction (group commit).

Whoever asked hears of it after the commit. In WAL mode with synchronous = NORMAL a commit is with the operating system,
which writes it to the disk whatever becomes of this process: kill -9 loses nothing. After a power cut the database is
sound, and may lack its last moments.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from pier_coordinator.store.facts import Fact
from pier_coordinator.store.rows import insert

BATCH_SECONDS = 0.005
"""How long a transaction takes up more operations: the first of them does not wait long for the last."""

T = TypeVar("T")
Told = Callable[[list[Fact]], None]

log = logging.getLogger(__name__)


@dataclass
class Transaction:
    """A transaction under way.

    Attributes:
        last: number of the newest fact.
        facts: those added in this transaction.
    """

    connection: sqlite3.Connection
    last: int
    facts: list[Fact] = field(default_factory=list)

    def add(self, facts: Iterable[Fact]) -> list[Fact]:
        """Add facts; returns them with their numbers. Raises ValueError for numbers that JSON has not."""
        numbered = [replace(fact, number=self.last + index) for index, fact in enumerate(facts, start=1)]
        insert(self.connection, numbered)
        self.facts += numbered
        self.last += len(numbered)
        return numbered

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Run a statement."""
        return self.connection.execute(sql, values)

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a question."""
        row: sqlite3.Row | None = self.execute(sql, *values).fetchone()
        return row


Operation = Callable[[Transaction], T]


@dataclass
class _Job:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def end(self) -> None:
        if self.future.done():  # nobody waits any more
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Writer:
    """Made in a running event loop, in which `told` hears of all facts, in order.

    Args:
        connection: autocommitting, usable by any thread; the writer's from now on.
        last: number of the newest fact.
        logged: called in the writer's thread with facts that were committed; deals with its own errors.
    """

    def __init__(self, connection: sqlite3.Connection, last: int, logged: Told, told: Told) -> None:
        self._connection = connection
        self._last = last
        self._logged = logged
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = self._over = False
        self._thread = Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    async def do(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction; returns its result once that is committed.

        Raises:
            sqlite3.Error: the database takes nothing: the disk is full, or it was closed.
            Exception: whatever the operation raised; then nothing of it was done.
        """
        if self._closing:
            raise sqlite3.ProgrammingError("the database was closed")
        job = _Job(operation, self._loop.create_future())
        self._jobs.put(job)
        result: T = await job.future
        return result

    async def close(self) -> None:
        """End, after everything that was asked before."""
        self._closing = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- in the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._over:
            jobs: list[_Job] = []
            if facts := self._commit(self._jobs.get(), jobs):
                self._logged(facts)
                self._loop.call_soon_threadsafe(self._told, facts)
            self._loop.call_soon_threadsafe(_end, jobs)

    def _commit(self, first: _Job | None, jobs: list[_Job]) -> list[Fact]:
        """Do jobs, which are put into the list, in one transaction; returns the facts that they added."""
        transaction = Transaction(self._connection, self._last)
        try:
            for job in self._batch(first):
                jobs.append(job)
                if len(jobs) == 1:
                    self._connection.execute("BEGIN IMMEDIATE")
                _attempt(job, transaction)
            if jobs:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            log.error("the database takes nothing: %s", error)
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for job in jobs:
                job.error = error
            return []
        self._last = transaction.last
        return transaction.facts

    def _batch(self, job: _Job | None) -> Iterator[_Job]:
        """A job, and what else was asked by now or is while it is done."""
        end = time.monotonic() + BATCH_SECONDS
        while job is not None:
            yield job
            if self._jobs.empty() or time.monotonic() >= end:
                return
            job = self._jobs.get()
        self._over = True


def _attempt(job: _Job, transaction: Transaction) -> None:
    """Do one of the operations of a transaction, or nothing of it. Raises sqlite3.Error: the transaction is lost."""
    last, count = transaction.last, len(transaction.facts)
    transaction.execute("SAVEPOINT operation")
    try:
        job.result = job.operation(transaction)
    except Exception as error:
        if not transaction.connection.in_transaction:  # SQLite has rolled all of it back: the disk is full, say
            raise
        job.error = error
        transaction.execute("ROLLBACK TO operation")
        transaction.last = last
        del transaction.facts[count:]
    transaction.execute("RELEASE operation")


def _end(jobs: Iterable[_Job]) -> None:
    for job in jobs:
        job.end()
