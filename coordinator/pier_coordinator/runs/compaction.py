"""Keeps the database small: when many facts have come, a snapshot of the board replaces them.

A snapshot of a thousand sites takes some seconds. New facts are stored meanwhile, as always, but the board gets them
only afterwards, so that the parts of the snapshot fit each other.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from itertools import islice

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.snapshots import finish, forget, pack, put_parts
from pier_coordinator.store.store import Store

SPARE = 64 << 20
"""Bytes of facts after which the next snapshot is taken: a few days of three sites, a quarter of an hour of a thousand.
A start reads that many in about ten seconds."""
LOOK = 10.0
"""Seconds between two looks at the size of the database."""
REST = 0.02
"""Seconds of rest after facts were deleted."""
PARTS, FACTS = 8, 200
"""Number of parts stored, and of facts shown to the board, at a time."""

log = logging.getLogger(__name__)


class Compaction:
    """Feeds a board with facts, and replaces them in the store by snapshots of the board.

    Attributes:
        busy: a snapshot is being taken: the board must not change.
    """

    def __init__(self, board: ReadModel) -> None:
        self._board = board
        self._number = 0
        self._held: list[Fact] = []
        self.busy = False

    def told(self, facts: list[Fact]) -> None:
        """Take in facts that were stored, in their order."""
        if self.busy:
            self._held += facts
        else:
            self._show(facts)

    def restore(self, store: Store) -> None:
        """Bring the board to where the store is."""
        self._number, parts = store.snapshot()
        for part in parts:
            self._board.restore(part)
        for fact in store.facts(after=self._number):
            self._show([fact])
            self._board.started = self._board.now()  # however long the reading takes

    async def keep_small(self, store: Store) -> None:
        """Take snapshots when there are many facts, until cancelled."""
        base = 2 * store.snapshot_bytes()
        while True:
            try:
                if store.used_bytes() > base + SPARE:
                    await self.compact(store)
                    base = store.used_bytes()
            except sqlite3.Error as error:  # the disk may have room again later
                if not store.problem:  # the store has said that
                    log.error("the database could not be compacted: %s", error)
            await asyncio.sleep(LOOK)

    async def compact(self, store: Store) -> None:
        """Replace all facts that the board knows by a snapshot. Raises sqlite3.Error; nothing is lost then."""
        await _forget(store)  # what an earlier one has left
        if self._number > store.snapshot()[0]:
            await self._keep(store)
            await _forget(store)

    async def _keep(self, store: Store) -> None:
        self.busy = True
        number, parts, first = self._number, self._board.parts(), 0
        try:
            while some := list(islice(parts, PARTS)):
                await store.do(put_parts, number, first, await asyncio.to_thread(list, map(pack, some)))
                first += len(some)
            await store.do(finish, number)
        finally:
            await self._catch_up()

    async def _catch_up(self) -> None:
        while self._held:
            facts, self._held = self._held[:FACTS], self._held[FACTS:]
            self._show(facts)
            await asyncio.sleep(0)
        self.busy = False

    def _show(self, facts: list[Fact]) -> None:
        for fact in facts:
            self._board.apply(fact)
            self._number = fact.number


async def _forget(store: Store) -> None:
    while await store.do(forget):  # noqa: ASYNC110 - nothing is waited for: calls of sites have their turn
        await asyncio.sleep(REST)
