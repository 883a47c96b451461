"""The only writer of the database: a thread that collects operations into one transaction (group commit).

A caller gets its result after the commit. In WAL mode with synchronous = NORMAL, the operating system holds a commit
and writes it to the disk even if this process dies: kill -9 loses nothing. After a power cut the database is intact but
may lack its last moments.
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

from pier_coordinator.store.facts import Fact, insert

BATCH_SECONDS = 0.005
"""How long a transaction collects operations, so that the first one does not wait long for the last."""

T = TypeVar("T")
Told = Callable[[list[Fact]], None]

log = logging.getLogger(__name__)


@dataclass
class Transaction:
    """A transaction in progress.

    Attributes:
        last: number of the newest fact.
        facts: the facts added in this transaction.
    """

    connection: sqlite3.Connection
    last: int
    facts: list[Fact] = field(default_factory=list)

    def add(self, facts: Iterable[Fact]) -> list[Fact]:
        """Add facts; return them with their numbers. Raises ValueError for a number that JSON cannot hold."""
        numbered = [replace(fact, number=self.last + index) for index, fact in enumerate(facts, start=1)]
        insert(self.connection, numbered)
        self.facts += numbered
        self.last += len(numbered)
        return numbered

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Execute a statement."""
        return self.connection.execute(sql, values)

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query's result; None if there is none."""
        row: sqlite3.Row | None = self.execute(sql, *values).fetchone()
        return row


Operation = Callable[[Transaction], T]


@dataclass
class _Job:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Writer:
    """Runs operations in its own thread. It must be created in a running event loop.

    Args:
        connection: autocommitting, usable by any thread; only the writer may use it from now on.
        last: number of the newest fact.
        logged: called in the writer's thread with the committed facts; it must handle its own errors.
        told: called in the event loop with the committed facts, in order.

    Attributes:
        problem: why the database took nothing when it was last written; "" if it did.
    """

    def __init__(self, connection: sqlite3.Connection, last: int, logged: Told, told: Told) -> None:
        self.problem = ""
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
        """Run an operation in a transaction; return its result once the transaction is committed.

        Raises:
            sqlite3.Error: the database cannot be written: the disk is full, or it was closed.
            Exception: whatever the operation raised; it has then changed nothing.
        """
        if self._closing:
            raise sqlite3.ProgrammingError("the database was closed")
        job = _Job(operation, self._loop.create_future())
        self._jobs.put(job)
        result: T = await job.future
        return result

    async def close(self) -> None:
        """Stop after all earlier operations are done."""
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
        """Run jobs in one transaction and append them to `jobs`; return the facts that they added."""
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
            self._say(str(error))
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for job in jobs:
                job.error = error
            return []
        self._say("")
        self._last = transaction.last
        return transaction.facts

    def _say(self, problem: str) -> None:
        if problem and not self.problem:
            log.error("the database takes nothing: %s; sites keep their reports until it does", problem)
        elif self.problem and not problem:
            log.info("the database takes everything again")
        self.problem = problem

    def _batch(self, job: _Job | None) -> Iterator[_Job]:
        """Yield this job, then those queued by now or within BATCH_SECONDS."""
        end = time.monotonic() + BATCH_SECONDS
        while job is not None:
            yield job
            if self._jobs.empty() or time.monotonic() >= end:
                return
            job = self._jobs.get()
        self._over = True


def _attempt(job: _Job, transaction: Transaction) -> None:
    """Run one operation of a transaction completely or not at all. Raises sqlite3.Error: the transaction is lost."""
    last, count = transaction.last, len(transaction.facts)
    transaction.execute("SAVEPOINT operation")
    try:
        job.result = job.operation(transaction)
    except Exception as error:
        full = isinstance(error, sqlite3.OperationalError)  # or the like: the next operation would fail, too
        if full or not transaction.connection.in_transaction:
            raise
        job.error = error
        transaction.execute("ROLLBACK TO operation")
        transaction.last = last
        del transaction.facts[count:]
    transaction.execute("RELEASE operation")


def _end(jobs: Iterable[_Job]) -> None:
    for job in jobs:
        if job.future.done():  # nobody is waiting any more
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
