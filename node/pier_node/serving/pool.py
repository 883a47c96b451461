"""Experts in memory: read when first asked, the least recently asked put out when there is no room.

A request reserves all the experts that it speaks with at once, and waits until they fit beside those that others speak
with: nobody holds some and waits for more, so that no two can wait for each other.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from pier_node.errors import PierError
from pier_node.model.decoder import Decoder
from pier_node.serving.shelf import Entry
from pier_node.signals import Signal
from pier_node.units import amount

log = logging.getLogger(__name__)


class Lost(Exception):
    """An expert cannot be asked any more: its files are gone or damaged, or what it says is no number."""


class Pool:
    """Some experts, by their index, of which as many are in memory as fit.

    Args:
        entries: all experts.
        memory: bytes for weights; 0: no limit.

    Attributes:
        lost: those that cannot be asked any more.
    """

    def __init__(self, entries: Sequence[Entry], memory: int = 0) -> None:
        self.lost: set[int] = set()
        self._entries, self._memory = entries, memory
        self._sizes = [entry.size for entry in entries]
        self._models: OrderedDict[int, Decoder] = OrderedDict()  # the least recently asked first
        self._users: Counter[int] = Counter()
        self._changed = Signal()

    @property
    def alive(self) -> list[int]:
        """Those that can be asked."""
        return [index for index in range(len(self._entries)) if index not in self.lost]

    def check_room(self, most: int) -> None:
        """Raise PierError unless any `most` experts have room together (0: all)."""
        sizes = sorted(self._sizes, reverse=True)[: most or None]
        if self._memory and sum(sizes) > self._memory:
            raise PierError(
                f"--memory {amount(self._memory)} is too little: {len(sizes)} experts take {amount(sum(sizes))}",
                "Give more, or have fewer experts answer a request with --top-k.",
            )

    @asynccontextmanager
    async def reserved(self, wanted: Iterable[int]) -> AsyncIterator[None]:
        """Room for these experts, until the end of the block; waits for it."""
        experts = {*wanted}
        await self._changed.until(lambda: self._fits(experts))
        self._users.update(experts)
        try:
            yield
        finally:
            self._users.subtract(experts)
            self._changed.notify()

    def model(self, index: int) -> Decoder:
        """The model of an expert for which there is room reserved. One thread calls this, always the same.

        Raises:
            Lost: it cannot be read; it is not tried again.
        """
        entry = self._entries[index]
        if index in self.lost:
            raise Lost(entry.name)
        if index not in self._models:
            self._make_room(entry)
            try:
                self._models[index] = entry.load()
            except Exception as error:  # whatever is wrong with one expert, the others go on
                self.lose(index, error)
                raise Lost(entry.name) from error
            log.info("the expert of %s was read: %s", entry.name, amount(entry.size))
        self._models.move_to_end(index)
        return self._models[index]

    def lose(self, index: int, why: object) -> None:
        """Ask an expert no more."""
        self.lost.add(index)
        self._models.pop(index, None)
        log.warning("the expert of %s drops out: %s", self._entries[index].name, str(why).splitlines()[0])

    @property
    def resident(self) -> list[int]:
        """Those in memory, the least recently asked first."""
        return [*self._models]

    def _fits(self, experts: set[int]) -> bool:
        used = experts | {index for index, users in self._users.items() if users > 0}
        return not self._memory or sum(self._sizes[index] for index in used) <= self._memory

    def _make_room(self, entry: Entry) -> None:
        held = sum(self._sizes[index] for index in self._models)
        for index in self.resident:
            if not self._memory or held + entry.size <= self._memory:
                return
            if self._users[index] <= 0:
                del self._models[index]
                held -= self._sizes[index]
                log.info("the expert of %s makes room for that of %s", self._entries[index].name, entry.name)
