"""What an iteration and an outer round of the replicas have in common: all sites of a plan work, and none without all.

It ends in what this site has worked out, or in a Suspicion, and changes nothing by itself. The first site of the plan
gathers what all have worked out. One that is lost, silent or gives up ends the attempt of all.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from pier.v1.peer_pb2 import Chunk, Total, Worked
from pier_node.faults import NO_FAULTS, Faults
from pier_node.outer.reduce import Reduction
from pier_node.outer.suspicion import NOBODY, Suspicion
from pier_node.pipeline.dropping import drop
from pier_node.pipeline.itinerary import Plan
from pier_node.pipeline.replicas import reduction
from pier_node.pipeline.times import Spans
from pier_node.pipeline.tools import Tools
from pier_node.pipeline.totals import Totals
from pier_node.shared import Vector
from pier_node.signals import Signal
from pier_node.wire.carrier import TALLY, BadMessage, PeerLost, PeerRefused

TELL_TIMEOUT = 5.0
T_co = TypeVar("T_co", covariant=True)


class Diverged(Suspicion):
    """What came out here is not finite: trying again would not help."""

    def __init__(self, what: str) -> None:
        super().__init__(NOBODY, f"{what} is not finite")


class Joint(ABC, Generic[T_co]):
    """This site's part in an attempt; `run` gives what it has worked out.

    Args:
        pairs: means are taken over pairs of replicas; else over all of a stage.

    Attributes:
        spans: where the time went.
    """

    def __init__(self, tools: Tools, plan: Plan, pairs: bool = False) -> None:
        self._tools, self.plan, self._teller, self._pairs = tools, plan, min(plan.stages), pairs
        self._node, self._news = tools.carrier.node, Signal()
        self._patience = tools.outer_patience if plan.message.meet else tools.patience
        self.spans = Spans(plan.round, time.time())
        self._reduction: Reduction | None = None
        self._reducing = False
        self._totals = Totals(plan, pairs) if self._teller == self._node else None
        self._broken: asyncio.Future[Suspicion] = asyncio.get_running_loop().create_future()

    async def run(self) -> T_co:
        """Do all of it. Raises Suspicion; the others of the attempt are told then."""
        work, watch = asyncio.create_task(self._work()), asyncio.create_task(self._watch())
        try:
            ends: set[asyncio.Future[Any]] = {work, watch, self._broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                raise self._broken.result()
            if watch.done():
                watch.result()  # it only ends by raising
            return work.result()
        except Suspicion as suspicion:
            await self._tell(suspicion)
            raise
        finally:
            await self._close(work, watch)

    # --- what others send ------------------------------------------------------------------------

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Take a stream of this attempt. Raises BadMessage."""
        if first.stage == Chunk.STAGE_PASSAGE:
            raise BadMessage("no microbatches come here")
        await self._news.until(lambda: self._reducing or self._broken.done())
        if self._reduction is None or self._broken.done():
            raise BadMessage("nothing of replicas is awaited here")
        await self._reduction.take(sender, first, rest)

    async def tally(self, sender: str, worked: Worked) -> Total:
        """At the teller: note what a site has worked out; the totals, once all have. Raises BadMessage."""
        if self._totals is None:
            raise BadMessage("another site gathers what is worked out")
        self._totals.add(sender, worked)
        self._news.notify()
        await self._news.until(lambda: self._broken.done() or self._known is not None)
        if self._known is None:
            raise BadMessage("that attempt is over")
        return self._known

    def drop(self, suspicion: Suspicion) -> None:
        """The attempt is over, because somebody says so."""
        if not self._broken.done():
            self._broken.set_result(suspicion)
        self._news.notify()

    @property
    def _known(self) -> Total | None:
        return self._totals.all() if self._totals else None

    # --- the work --------------------------------------------------------------------------------

    @abstractmethod
    async def _work(self) -> T_co:
        """What this site has to do. Raises Suspicion."""

    async def _reduce(self, weights: Mapping[str, int], own: Vector, mean: Vector, faults: Faults = NO_FAULTS) -> None:
        """Take the mean over the replicas that this site meets; of one that has none it is its own."""
        carrier, silence, began = self._tools.carrier, self._patience.seconds(), asyncio.get_running_loop().time()
        nodes = self.plan.group(self._node, self._pairs)
        self._reduction = reduction(carrier, self.plan, nodes, weights, own, mean, silence, faults)
        if self._reduction is None:
            mean[:] = own
        self._open()
        if self._reduction:
            with self._waiting(silence):
                await self._reduction.run()
            self._patience.saw(self._reduction.longest_wait)
        self.spans.average = asyncio.get_running_loop().time() - began

    @contextmanager
    def _waiting(self, patience: float) -> Iterator[None]:
        """What ends badly after much of our patience might have ended well, whoever lost theirs first: have more."""
        began = asyncio.get_running_loop().time()
        try:
            yield
        except BaseException:  # cancelled, too: another site gave up
            if asyncio.get_running_loop().time() - began >= patience / 2:
                self._patience.late()
            raise

    def _open(self) -> None:
        """Streams of replicas have something to go to, or are refused, from now on."""
        self._reducing = True
        self._news.notify()

    def _worked(self, square: float = 0.0, loss: float = 0.0, digest: bytes = b"") -> Worked:
        name, round = self.plan.name, self.plan.round
        return Worked(attempt=name, round=round, square=square, loss=loss, digest=digest)

    async def _total(self, worked: Worked) -> Total:
        """What all stages have worked out together, from the teller."""
        patience, began = self._patience.seconds(), asyncio.get_running_loop().time()
        try:
            with self._waiting(patience):
                async with asyncio.timeout(patience):
                    if self._teller == self._node:
                        total = await self.tally(self._node, worked)
                    else:
                        total = await self._tools.carrier.call(self._teller, TALLY, worked, patience)
        except PeerRefused as refused:
            raise Suspicion(NOBODY, f"{self._teller}: {refused.reason}") from refused
        except PeerLost as lost:
            raise Suspicion(self._teller, lost.reason) from lost
        except (BadMessage, TimeoutError) as error:
            raise Suspicion(NOBODY, str(error) or f"some have not done their part after {patience:.0f} s") from error
        self.spans.total = asyncio.get_running_loop().time() - began
        self._patience.saw(self.spans.total)
        self._check(total)
        return total

    def _check(self, total: Total) -> None:
        """Raises Suspicion: the teller says what cannot be of this plan."""
        if not {*total.moved} <= {*self.plan.stages.values()}:
            raise Suspicion(self._teller, "has told of stages that nobody of the plan holds")
        if len(total.digests) != len(total.moved):
            raise Suspicion(self._teller, "has told other stages than bits of them")

    # --- how it ends -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Raises Suspicion once a site of the plan is gone."""
        roster = self._tools.roster
        while True:
            for node in self.plan.stages:
                if not roster.alive(node):
                    raise Suspicion(node, "does not answer any more")
            await roster.changed.wait(1.0)

    async def _tell(self, suspicion: Suspicion) -> None:
        others = [node for node in self.plan.stages if node not in (self._node, suspicion.node)]
        await drop(self._tools.carrier, others, self.plan.name, suspicion.node, str(suspicion), TELL_TIMEOUT)

    async def _close(self, *tasks: asyncio.Task[Any]) -> None:
        self.drop(Suspicion(NOBODY, "it is over"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
