"""Promises: keeps one site's Commitments on the disk, always before they count, and the result that it voted for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from pier.v1.peer_pb2 import Ballot, Handover, Ready, Signed
from pier_node.outer.commitments import Cast, Commitments, as_ballot
from pier_node.outer.state import OuterState
from pier_node.outer.statements import Statements

T = TypeVar("T")

log = logging.getLogger(__name__)


class Journal(Protocol):
    """What remembers Commitments across a crash: see pier_node/journal.py."""

    def load(self, round: int, node: str) -> Commitments:
        """What binds a site whose disk holds the state of `round`."""

    def keep(self, commitments: Commitments) -> None:
        """Returns only when they would survive a crash. Raises PierError: they cannot be written."""


class Superseded(Exception):
    """What a site announced is not true any more: it cannot take part on that ground."""


class Promises:
    """What binds the site `node`, whose newest state is of `round`.

    Attributes:
        now: as the disk has it.
        shadow: the staged result of our last vote; None: there is none, or it was lost in a restart.
    """

    def __init__(self, journal: Journal, node: str, round: int) -> None:
        self._journal, self._node, self._round = journal, node, round
        self.now = journal.load(round, node)
        self.shadow: OuterState | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def lost(self) -> bool:
        """Whether this site committed a later round than its disk has: it decides nothing until it has that again."""
        return self._round < self.now.committed

    @property
    def votes(self) -> frozenset[str]:
        """Of the last round's members, in this site's hand."""
        return frozenset() if self.lost else self.now.votes

    async def settle(self, round: int) -> None:
        """The state of this round is committed, and on our disk. Raises PierError."""
        await self._change(lambda now: now.settled(round, self._node))
        self._round = round

    async def promise(self, ballot: Ballot, votes: Collection[str]) -> None:
        """Take part in no lower ballot from now on.

        Args:
            votes: those that we announced.

        Raises:
            Superseded: they are not those in our hand any more.
            PierError: the promise cannot be written.
        """

        def promised(now: Commitments) -> Commitments:
            if self.lost or now.votes != set(votes):
                raise Superseded
            return now.promising((ballot.number, ballot.keeper))

        await self._change(promised)

    async def cast(self, vote: Cast, shadow: OuterState) -> None:
        """Vote for a result that we hold. Raises PierError."""
        await self._change(lambda now: now.casting(vote), shadow)

    async def give(self, heir: str) -> frozenset[str]:
        """Have no votes any more; those that the heir may have now. Raises PierError."""
        votes = self.votes
        if self.lost or self.now.engaged:  # an heir would not know what binds them
            return frozenset()
        await self._change(lambda now: now if now.engaged else now.giving(heir))
        return votes - self.now.votes

    def has_taken(self, handover: bytes) -> bool:
        """Whether the votes of this statement were taken already: whoever gave them may have got them back since."""
        return any(Signed.FromString(it).statement == handover for it in self.now.handovers)

    async def take(self, round: int, votes: Collection[str], handovers: Iterable[Signed] = ()) -> None:
        """Have these votes of the members of that round too. Raises PierError, and ValueError: it is not the last."""
        written = frozenset(it.SerializeToString() for it in handovers)
        await self._change(lambda now: now.taking(round, frozenset(votes), written))

    def handovers(self, base: bytes, statements: Statements) -> list[Signed]:
        """What proves which votes are in our hand, and which we gave away; `base` is the digest of our state."""
        round = self.now.committed
        ours = [
            Handover(node=self._node, heir=it.heir, round=round, base=base, votes=sorted(it.votes), number=number)
            for number, it in enumerate(self.now.gifts, 1)
        ]
        return [*map(Signed.FromString, sorted(self.now.handovers)), *map(statements.seal, ours)]

    def announce(self, ready: Ready) -> None:
        """Say what binds us."""
        ready.votes.extend(sorted(self.votes))
        ready.seen.CopyFrom(as_ballot(self.now.promised))
        if vote := self.now.vote:
            ready.voted.CopyFrom(vote.value)
            ready.voted_in.CopyFrom(as_ballot(vote.ballot))
            ready.holds = self.shadow is not None

    async def _change(self, change: Callable[[Commitments], Commitments], shadow: OuterState | None = None) -> None:
        async with self._one_at_a_time:
            changed = change(self.now)
            if changed != self.now:
                await to_the_end(self._write(changed, shadow))

    async def _write(self, changed: Commitments, shadow: OuterState | None) -> None:
        await asyncio.to_thread(self._journal.keep, changed)
        self.now = changed
        if shadow or not changed.vote:
            self.shadow = shadow


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Do it to its end even when we are cancelled meanwhile: what is on the disk and what we believe must agree."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            log.info("not done, and not wanted any more: %s", error)
        raise
    return task.result()
