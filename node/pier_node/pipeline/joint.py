"""The common base of an iteration's attempt and an outer round of the replicas: all sites of a plan succeed, or none.

An attempt ends with what this site has computed or with a Suspicion, and changes nothing by itself. The aggregator,
the first site of the plan, collects the results of all sites and computes the totals. If a site is lost, silent or
gives up, the attempt ends for all. The other sites are told; one that does not get the message finds out by timeout.

The mean over the replicas of a stage, of gradients or of what they did apart, is equal in every bit. It uses the
reduce-scatter and all-gather of the outer rounds (rounds/reduce.py) within one attempt, so that any replica can give
its stage to a returning site. What they did apart travels in the run's codec. Gradients are not clipped here: they are
clipped for all stages together, by the global norm.

`Dispatch` gives incoming streams and requests to the running attempt, or to the round. They may arrive shortly before
this site knows of its attempt. They then wait, for a limited time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import Generic, NoReturn, TypeVar

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import Buffer, Vector
from pier_node.base.tasks import Signal, first_of
from pier_node.outer.codec.interface import Codec, Plain
from pier_node.outer.mean import Update, split
from pier_node.outer.times import Spans
from pier_node.pipeline.context import Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.rounds import exchange_plan as outer
from pier_node.rounds.attempt import heard_of
from pier_node.rounds.reduce import Reduction
from pier_node.rounds.roster import first_away
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.wire.carrier import DROP, TALLY, BadMessage, Carrier, Chunk, PeerLost, PeerRefused, Stage
from pier_proto.v1.peer_pb2 import Ack, Ballot, Dropped, Share, Total, Worked

log = logging.getLogger(__name__)


async def drop(
    carrier: Carrier, nodes: Iterable[str], attempt: bytes, suspect: str, reason: str, patience: float
) -> None:
    """Tell these nodes that the attempt is over, each within `patience` seconds."""
    notice = Dropped(attempt=attempt, suspect=suspect, reason=reason[:1000])

    async def tell(node: str) -> None:
        try:
            await carrier.call(node, DROP, notice, patience)
        except PeerLost as lost:
            log.info("could not tell %s that the attempt is over: %s", lost.node, lost.reason)

    await asyncio.gather(*(tell(node) for node in nodes))


LONGEST = 1e9
"""A norm larger than that of any gradient."""
MOST = 1e44
"""More than the square of any gradient, or the sum of losses in fp32. Totals of more could be infinite."""


@dataclass(frozen=True)
class StagePlan(outer.Plan):
    """The plan of a reduction, identified by the name of its attempt.

    Attributes:
        exact_end: the last element is a chunk of its own, so that a codec can leave it as it is (`ExactEnd`).
    """

    name: bytes = b""
    exact_end: bool = False

    def ranges(self, share: Share) -> list[tuple[int, int]]:
        """See outer.Plan."""
        ranges, end = super().ranges(share), self.shares[-1].offset + self.shares[-1].length
        if not self.exact_end or (end - 1, end) in ranges:
            return ranges
        return [*ranges[:-1], (ranges[-1][0], end - 1), (end - 1, end)] if ranges and ranges[-1][1] == end else ranges

    def message(self, stage: Stage, offset: int, data: Buffer) -> Chunk:
        """A chunk of this attempt."""
        return Chunk(round=self.round, stage=stage, offset=offset, data=data, meeting=self.name)


PLAIN = Plain()


class ExactEnd(Codec):
    """A lossy codec that leaves a single value as it is: the number of microbatches (pipeline/outer_step.py)."""

    def __init__(self, codec: Codec) -> None:
        self.name, self._codec = codec.name, codec

    def _of(self, length: int) -> Codec:
        return PLAIN if length == 1 else self._codec

    def encode(self, values: Vector) -> Buffer:
        """See Codec."""
        return self._of(len(values)).encode(values)

    def decode(self, data: Buffer, length: int) -> Vector:
        """See Codec."""
        return self._of(length).decode(data, length)

    def size(self, length: int) -> int:
        """See Codec."""
        return self._of(length).size(length)


def square(gradient: Vector) -> float:
    """Square of the gradient's norm, summed in double precision."""
    return float(np.square(gradient, dtype=np.float64).sum())


class Totals:
    """The totals of one attempt.

    Args:
        pairs: replicas must have the same bits in pairs; otherwise all replicas of a stage must.

    The square of a stage's gradient is the mean of its replicas' squares, weighted by the microbatches that each one
    saw. If the replicas have averaged their gradients, it equals the square of each. So all sites clip by the same
    norm, and it is the expected norm for one model that takes each stage from any of its replicas.
    """

    def __init__(self, plan: Plan, pairs: bool = False) -> None:
        self._plan, self._pairs = plan, pairs
        self._worked: dict[str, Worked] = {}

    def add(self, node: str, worked: Worked) -> None:
        """Record a site's result; the first one counts. Raises BadMessage."""
        stage = self._plan.stages.get(node)
        if stage is None:
            raise BadMessage(f"{node} takes no part in this attempt")
        for other in self._plan.group(node, self._pairs):
            if other in self._worked and self._worked[other].digest != worked.digest:
                raise BadMessage(f"{node} and {other} have other bits of stage {stage}")
        self._worked.setdefault(node, worked)

    def all(self) -> Total | None:
        """The sum over the visited stages, the mean loss and the moved stages; None: not all sites have reported."""
        if len(self._worked) < len(self._plan.stages):
            return None
        losses = [self._worked[node].loss for node in self._plan.stages]
        digests = {stage: self._digest(stage) for stage in sorted({*self._plan.stages.values()})}
        moved = [stage for stage, digest in digests.items() if digest]
        return Total(
            square=sum(self._square(stage) for stage in sorted(self._plan.visited)),
            loss=sum(losses) / max(len(self._plan.ways), 1),
            moved=moved,
            digests=[digests[stage] for stage in moved],
        )

    def _digest(self, stage: int) -> bytes:
        """Digest of what the stage's replicas reported: the common one, if they are all equal."""
        told = [self._worked[node].digest for node in self._plan.replicas(stage)]
        return told[0] if len({*told}) == 1 else hashlib.sha256(b"".join(told)).digest()

    def _square(self, stage: int) -> float:
        weights, nodes = self._plan.weights, self._plan.replicas(stage)
        return sum(weights[it] * self._worked[it].square for it in nodes) / sum(weights[it] for it in nodes)


TELL_TIMEOUT = 5.0
T_co = TypeVar("T_co", covariant=True)


class Overflow(Suspicion):
    """A result here is not finite or too large. A single sender of what it was made of is suspected.

    Attributes:
        own: nobody sent any of it: training has diverged, and another attempt would not help.
    """

    def __init__(self, what: str, senders: Collection[str] = ()) -> None:
        super().__init__(next(iter(senders)) if len(senders) == 1 else NOBODY, f"{what} is not finite or too large")
        self.own = not senders


class Joint(ABC, Generic[T_co]):
    """This site's part in an attempt; `run` returns what it has computed.

    Args:
        pairs: means are over pairs of replicas; otherwise over all replicas of a stage.
    """

    def __init__(self, tools: Tools, plan: Plan, pairs: bool = False) -> None:
        self._tools, self.plan, self._aggregator, self._pairs = tools, plan, min(plan.stages), pairs
        self._node, self._news = tools.carrier.node, Signal()
        self._patience = tools.outer_patience if plan.message.meet else tools.patience
        self.spans = Spans(plan.round, time.time())
        self._reduction: Reduction | None = None
        self._reducing = False
        self._totals = Totals(plan, pairs) if self._aggregator == self._node else None
        self._broken: asyncio.Future[Suspicion] = asyncio.get_running_loop().create_future()

    async def run(self) -> T_co:
        """Do this site's part. Raises Suspicion, after the other sites of the attempt are told."""
        try:
            return await first_of(self._until_broken(), self._watch(), self._work())
        except Suspicion as suspicion:
            await self._tell(suspicion)
            raise
        finally:
            await self._close()

    # --- requests of other sites -------------------------------------------------------------------

    async def take(self, sender: str, first: Chunk, rest: AsyncIterator[Chunk]) -> None:
        """Receive a stream of this attempt. Raises BadMessage."""
        if first.stage == Chunk.STAGE_ACTIVATION:
            raise BadMessage("no microbatches come here")
        await self._news.until(lambda: self._reducing or self._broken.done())
        if self._reduction is None or self._broken.done():
            raise BadMessage("nothing of replicas is awaited here")
        await self._reduction.take(sender, first, rest)

    async def tally(self, sender: str, worked: Worked) -> Total:
        """At the aggregator: record a site's result, and return the totals once all have reported.

        Raises BadMessage.
        """
        if self._totals is None:
            raise BadMessage("another site gathers what is worked out")
        if sender in self.plan.stages and max(worked.square, worked.loss) > MOST:
            self.drop(Suspicion(sender, f"tells a square of {worked.square:.3g} and a loss of {worked.loss:.3g}"))
        self._totals.add(sender, worked)
        self._news.notify()
        await self._news.until(lambda: self._broken.done() or self._known is not None)
        if self._known is None:
            raise BadMessage("that attempt is over")
        return self._known

    def drop(self, suspicion: Suspicion) -> None:
        """End the attempt, because another site says so."""
        if not self._broken.done():
            self._broken.set_result(suspicion)
        self._news.notify()

    @property
    def _known(self) -> Total | None:
        return self._totals.all() if self._totals else None

    # --- the work --------------------------------------------------------------------------------

    @abstractmethod
    async def _work(self) -> T_co:
        """This site's work. Raises Suspicion."""

    async def _reduce(
        self, weights: Mapping[str, int], own: Update, mean: Vector, codec: Codec = PLAIN, faults: Faults = NO_FAULTS
    ) -> None:
        """Average over the replicas that this site meets; without any, the mean is what it would send.

        Args:
            weights: of the replicas' vectors, by node id; vectors of weight 0 are not sent.
            mean: receives the mean; same length as the vector of `own`.
        """
        silence, began = self._patience.seconds(), asyncio.get_running_loop().time()
        nodes = self.plan.group(self._node, self._pairs)
        if len(nodes) == 1:
            mean[:] = own.sent()
            self._open()
        else:
            parts = zip(nodes, split(len(mean), [1.0] * len(nodes)), strict=True)
            shares = [
                Share(node=it, tokens=weights[it], norm=LONGEST, offset=at, length=size) for it, (at, size) in parts
            ]
            weighed = codec.lossy and not self._pairs  # the last value is a number of microbatches
            plan = StagePlan(
                self.plan.round, Ballot(), shares, LONGEST, silence, name=self.plan.name, exact_end=weighed
            )
            used = ExactEnd(codec) if weighed else codec
            self._reduction = Reduction(self._tools.carrier, plan, own, mean, used, faults)
            self._open()
            with self._waiting(silence):
                await self._reduction.run()
            self._patience.saw(self._reduction.longest_wait)
        self.spans.average = asyncio.get_running_loop().time() - began

    @contextmanager
    def _waiting(self, patience: float) -> Iterator[None]:
        """Extend the patience after a failure that took much of it: with more time, the work might have succeeded."""
        began = asyncio.get_running_loop().time()
        try:
            yield
        except BaseException:  # also if cancelled because another site gave up
            if asyncio.get_running_loop().time() - began >= patience / 2:
                self._patience.late()
            raise

    def _open(self) -> None:
        """From now on, accept or refuse streams of replicas."""
        self._reducing = True
        self._news.notify()

    def _worked(self, square: float = 0.0, loss: float = 0.0, digest: bytes = b"") -> Worked:
        name, round = self.plan.name, self.plan.round
        return Worked(attempt=name, round=round, square=square, loss=loss, digest=digest)

    async def _total(self, worked: Worked) -> Total:
        """The totals over all stages, from the aggregator. Raises Suspicion, also if they do not fit this plan."""
        patience, began = self._patience.seconds(), asyncio.get_running_loop().time()
        try:
            with self._waiting(patience):
                async with asyncio.timeout(patience):
                    if self._aggregator == self._node:
                        total = await self.tally(self._node, worked)
                    else:
                        total = await self._tools.carrier.call(self._aggregator, TALLY, worked, patience)
        except PeerRefused as refused:
            raise Suspicion(NOBODY, f"{self._aggregator}: {refused.reason}") from refused
        except PeerLost as lost:
            raise Suspicion(self._aggregator, lost.reason) from lost
        except (BadMessage, TimeoutError) as error:
            raise Suspicion(NOBODY, str(error) or f"some have not done their part after {patience:.0f} s") from error
        self.spans.total = asyncio.get_running_loop().time() - began
        self._patience.saw(self.spans.total)
        if not {*total.moved} <= {*self.plan.stages.values()}:
            raise Suspicion(self._aggregator, "has told of stages that nobody of the plan holds")
        if len(total.digests) != len(total.moved):
            raise Suspicion(self._aggregator, "has told other stages than bits of them")
        return total

    # --- the end ---------------------------------------------------------------------------------

    async def _until_broken(self) -> NoReturn:
        raise await asyncio.shield(self._broken)

    async def _watch(self) -> NoReturn:
        raise Suspicion(await first_away(self._tools.roster, self.plan.stages), "does not answer any more")

    async def _tell(self, suspicion: Suspicion) -> None:
        others = [node for node in self.plan.stages if node not in (self._node, suspicion.node)]
        await drop(self._tools.carrier, others, self.plan.name, suspicion.node, str(suspicion), TELL_TIMEOUT)

    async def _close(self) -> None:
        self.drop(Suspicion(NOBODY, "it is over"))


Push = Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]
EARLY = 8
"""Number of drops to remember, of attempts that this site may have yet to begin."""


class Dispatch:
    """Serves streams, totals and drops on a carrier.

    Args:
        rounds: receives the streams of rounds.
        begun: returns the name of the last attempt that this site has taken part in.
        committed: returns the last round that this site knows to be decided.
        news: notified when one of these changes.
    """

    def __init__(
        self,
        carrier: Carrier,
        rounds: Push,
        attempt: Callable[[], Joint[object] | None],
        begun: Callable[[], bytes],
        committed: Callable[[], int],
        news: Signal,
    ) -> None:
        self._rounds, self._attempt, self._committed, self._news = rounds, attempt, committed, news
        self._begun, self._early = begun, deque[tuple[str, Dropped]](maxlen=EARLY)
        carrier.serve_push(self._take)
        carrier.serve(TALLY, self._tally)
        carrier.serve(DROP, self._drop)

    async def _take(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        first = await anext(chunks, None)
        if first is None:
            raise BadMessage("an empty stream")
        if first.stage == Chunk.STAGE_ACTIVATION:
            name = bytes(first.activation.attempt)
        elif first.stage in (Chunk.STAGE_SCATTER, Chunk.STAGE_GATHER) and first.meeting:
            name = bytes(first.meeting)
        else:
            await self._rounds(sender, _again(first, chunks))
            return
        attempt = await self._named(name, first.round)
        await attempt.take(sender, first, chunks)

    async def _tally(self, sender: str, worked: Worked) -> Total:
        attempt = await self._named(bytes(worked.attempt), worked.round)
        return await attempt.tally(sender, worked)

    def dropped(self, plan: Plan) -> Suspicion | None:
        """Why another site has dropped an attempt that this site has not begun yet; None: nobody has."""
        told = ((who, it) for who, it in self._early if it.attempt == plan.name and who in plan.stages)
        return next(starmap(_suspicion, told), None)

    async def _drop(self, sender: str, dropped: Dropped) -> Ack:
        attempt = self._attempt()
        if attempt is None or attempt.plan.name != dropped.attempt:
            self._early.append((sender, dropped))
        elif sender in attempt.plan.stages:
            attempt.drop(_suspicion(sender, dropped))
        return Ack()

    async def _named(self, name: bytes, round: int) -> Joint[object]:
        await heard_of("attempt", self._news, lambda: self._begun() == name or self._committed() >= round)
        attempt = self._attempt()
        if attempt is None or attempt.plan.name != name:
            raise BadMessage("late: that attempt is over")
        return attempt


def _suspicion(sender: str, dropped: Dropped) -> Suspicion:
    return Suspicion(dropped.suspect, f"{sender} gave up: {dropped.reason}")


async def _again(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk
