"""One meeting of a pair: swap, stage, and decide, so that both sites take the step or neither does.

This is two-phase commit with presumed abort (Mohan, Lindsay, Obermarck, TODS 11, 1986); the member with the lower id
decides. The other member writes its yes to disk before it says so. The decider has its new state on disk before it
answers, and answers no to a question about a meeting that it has no record of. docs/noloco.md describes the states and
messages.

`Records` is what a site remembers of its pairs: the partner of each round's step, and its own votes that had no answer.
It is pure. The journal keeps it on disk (site/journal.py); docs/noloco.md says when it is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.patience import Backoff, LearnedWait
from pier_node.base.shared import Vector
from pier_node.base.tasks import Signal, first_of, run_to_end
from pier_node.base.tracing import span
from pier_node.config.run import NolocoSection
from pier_node.gossip.exchange import Lane, Swap, SwapPlan
from pier_node.gossip.rendezvous import Met, meeting_name
from pier_node.gossip.standing import Chain, Standing
from pier_node.outer.advance import advance_pair
from pier_node.outer.codec import Codec
from pier_node.outer.mean import Update, Weighing, norm_limit
from pier_node.outer.noloco import needs_anchors
from pier_node.outer.state import OuterState, piece_hashes, state_digest
from pier_node.rounds.attempt import check_finite
from pier_node.rounds.exchange_plan import CHUNK
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import SETTLE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import SettleReply, SettleRequest, Signed

T = TypeVar("T")

KEPT = 64
"""Pairs and doubts that are remembered; a site that asks about an older one is told that it came to nothing."""


@dataclass(frozen=True)
class Doubt:
    """This site said yes to a pair's step, and does not know whether the decider took it.

    Attributes:
        digest: digest of what it said yes to.
    """

    round: int
    decider: str
    meeting: bytes
    digest: bytes


@dataclass(frozen=True)
class Records:
    """By round: the partner that its step was taken with, and open doubts. A round in neither was taken alone.

    Attributes:
        vouches: the chain that gives this site its standing (gossip/standing.py).
    """

    partners: Mapping[int, str] = field(default_factory=dict)
    doubts: Mapping[int, Doubt] = field(default_factory=dict)
    vouches: Chain = ()

    def voted(self, doubt: Doubt) -> Records:
        """Records with a yes that has no answer yet."""
        return replace(self, doubts=_newest({**self.doubts, doubt.round: doubt}))

    def took(self, round: int, partner: str) -> Records:
        """Records with a step that was taken with a partner; this ends any doubt about that round."""
        return replace(self, partners=_newest({**self.partners, round: partner}), doubts=self._without(round))

    def learned(self, round: int) -> Records:
        """Records without the doubt about a round, however that round ended."""
        return replace(self, doubts=self._without(round))

    def _without(self, round: int) -> dict[int, Doubt]:
        return {number: doubt for number, doubt in self.doubts.items() if number != round}


def _newest(by_round: dict[int, T]) -> dict[int, T]:
    return {number: by_round[number] for number in sorted(by_round)[-KEPT:]}


ANSWER = 10.0
"""Seconds for which a question about a meeting's outcome is held open."""
PATIENCE = 300.0
"""Seconds for which a site in doubt keeps asking a decider that is alive on the roster but does not answer."""
NO_TIMEOUT = 2.0

log = logging.getLogger(__name__)

Commit = Callable[[OuterState], Awaitable[None]]
"""Makes a state this site's own; returns once the state would survive a power cut."""
Outcome = SettleReply.Outcome


class PairLog(Protocol):
    """Remembers pairs across a crash: see site/journal.py."""

    def load(self) -> Records:
        """The records that were kept last."""

    def keep(self, records: Records) -> None:
        """Return once the records would survive a crash."""


@dataclass
class PairTools:
    """What a meeting works with.

    Attributes:
        news: notified when a question, a vote or a new meeting arrives.
        silence: learns how long partners keep each other waiting.
        weighing: how many tokens a site can have in the ledger after a round, by round number.
    """

    carrier: Carrier
    roster: Roster
    standing: Standing
    journal: PairLog
    rates: NolocoSection
    codec: Codec
    faults: Faults = NO_FAULTS
    chunk: int = CHUNK
    weighing: Callable[[int], Weighing] = lambda _: Weighing()

    def __post_init__(self) -> None:
        self.node = self.carrier.node
        self.news = Signal()
        self.records = self.journal.load()
        self.silence = LearnedWait(initial=30.0, floor=10.0)
        self._means: list[Vector] = []

    def means(self, count: int, length: int) -> list[Vector]:
        """Memory for means, shape [length] each: every round reuses it, so that its pages are already mapped."""
        if len(self._means) != count or len(self._means[0]) != length:
            self._means = [np.zeros(length, np.float32) for _ in range(count)]
        return self._means

    async def keep(self, records: Records) -> None:
        """Write the records durably. Raises PierError."""
        await run_to_end(self._kept(records))

    async def _kept(self, records: Records) -> None:
        await asyncio.to_thread(self.journal.keep, records)
        self.records = records


class PairCommit:
    """This site's part in a meeting.

    Args:
        update: the weights that the pair swaps: φ minus the unsent update Δ.
        held: the partner's anchor, as we told the partner that we have it.
    """

    def __init__(self, tools: PairTools, state: OuterState, met: Met, update: Update, held: Vector | None) -> None:
        weights = update.vector
        self._tools, self._state = tools, state
        self.round, self.partner = met.told.round, met.node
        self._began = asyncio.get_running_loop().time()
        self.name = meeting_name(self.round, (tools.node, met.told.nonce), (met.node, met.said.nonce))
        self._decides = tools.node < met.node
        told = {tools.node: met.told.ledger, met.node: met.said.ledger}
        self._ledger = merged(told, tools.weighing(self.round))
        vectors = [weights, state.anchor] if needs_anchors(tools.rates) else [weights]
        self._means = tools.means(len(vectors), len(weights))
        wanted, had = met.said.holds != state.digest, met.told.holds == met.said.digest
        lanes = [Lane(weights, self._means[0], error=update.error)]
        lanes += [
            Lane(vector, mean, held if had else None, wanted)
            for vector, mean in zip(vectors[1:], self._means[1:], strict=True)
        ]
        limit, wait = norm_limit(state.norm), tools.silence.seconds()
        plan = SwapPlan(self.round, self.name, met.node, limit, wait, lambda: tools.roster.alive(met.node), tools.chunk)
        self.swap = Swap(tools.carrier, plan, lanes, tools.codec, tools.faults)
        self._vote: SettleRequest | None = None
        self._vouch: Signed | None = None
        self._outcome: Outcome.ValueType = Outcome.OUTCOME_UNDECIDED

    async def run(self, commit: Commit) -> None:
        """Take the pair's step. Raises Suspicion if it was not taken here; then `commit` was not called."""
        agreed = False
        try:
            shadow, digest = await self._stage()
            if self._decides:
                await self._await_vote(digest)
            agreed = True
        finally:
            if not agreed:
                self._decided(Outcome.OUTCOME_REFUSED)
        if not self._decides:
            await self._ask(digest)
        await run_to_end(self._take(shadow, commit))  # it must have on disk what it tells others

    async def answer(self, request: SettleRequest) -> Outcome.ValueType:
        """Receive the partner's vote, and tell it how the meeting ends if that is decided soon."""
        if self._vote is None:
            self._vote = request
            self._vouch = request.vouch if request.HasField("vouch") else None
            self._tools.news.notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER):
                await self._tools.news.until(lambda: self._outcome != Outcome.OUTCOME_UNDECIDED)
        return self._outcome

    async def _take(self, shadow: OuterState, commit: Commit) -> None:
        await commit(shadow)
        records = self._tools.records.took(self.round, self.partner)
        await self._tools.keep(replace(records, vouches=self._chain() or records.vouches))
        self._decided(Outcome.OUTCOME_COMMITTED)

    def _chain(self) -> Chain | None:
        """The chain that the partner's vouch makes, if it is better than this site's."""
        try:
            return self._tools.standing.better(self.partner, self._vouch) if self._vouch else None
        except BadMessage as bad:
            log.info("round %d: %s", self.round, bad)
            return None

    def _decided(self, outcome: Outcome.ValueType) -> None:
        self._outcome = outcome
        self._tools.news.notify()

    # --- to the same means ---------------------------------------------------------------------

    async def _stage(self) -> tuple[OuterState, bytes]:
        """Swap; return the shadow, and the digest of what it is made of. Raises Suspicion."""
        tools = self._tools
        await tools.faults.reach(self.round, "met")
        with span("exchange"):
            await self.swap.run()
        tools.silence.saw(self.swap.longest_wait)
        with span("outer step"):
            shadow, digest = await run_to_end(asyncio.to_thread(self._computed))
        try:
            await check_finite(shadow)
        except Suspicion:
            await self._say_no()
            raise
        await tools.faults.reach(self.round, "staged")
        return shadow, digest

    def _computed(self) -> tuple[OuterState, bytes]:
        members = sorted((self._tools.node, self.partner))
        hashes = {str(number): piece_hashes(mean) for number, mean in enumerate(self._means)}
        agreed_on = state_digest(self.round, members, self._ledger, 0, hashes)
        shadow = advance_pair(self._state, self.round, members, self._means, self._ledger, self._tools.rates)
        _ = shadow.digest  # computed here, away from the event loop
        return shadow, agreed_on

    # --- the decider ---------------------------------------------------------------------------

    async def _await_vote(self, digest: bytes) -> None:
        tools, loop = self._tools, asyncio.get_running_loop()
        began = loop.time()
        while self._vote is None:
            if not tools.roster.stayed(self.partner, self._began):
                raise Suspicion(self.partner, "lost before it voted")
            if loop.time() - began > tools.silence.seconds():
                raise Suspicion(self.partner, f"did not vote for {tools.silence.seconds():.0f} s")
            await tools.news.wait(1.0)
        tools.silence.saw(loop.time() - began)
        if self._vote.left or not self._vote.yes:
            raise Suspicion(self.partner, "said no")
        if self._vote.digest != digest:
            raise Suspicion(self.partner, "made other means of it than we")
        await tools.faults.reach(self.round, "voting")

    # --- the other one ---------------------------------------------------------------------------

    async def _say_no(self) -> None:
        """Say no, to spare the decider the wait; if this does not arrive, the decider learns it from the silence."""
        if self._decides:
            return
        request = SettleRequest(round=self.round, meeting=self.name, at=self._state.round)
        try:
            await self._tools.carrier.call(self.partner, SETTLE, request, NO_TIMEOUT)
        except PeerLost as lost:
            log.info("round %d: could not say no to %s: %s", self.round, lost.node, lost.reason)

    async def _ask(self, digest: bytes) -> None:
        """Say yes, durably, and return once the decider has committed. Raises Suspicion."""
        tools = self._tools
        await tools.keep(tools.records.voted(Doubt(self.round, self.partner, self.name, digest)))
        await tools.faults.reach(self.round, "journaled")
        outcome = await self._outcome_at_decider(digest)
        if outcome == Outcome.OUTCOME_REFUSED:
            await tools.keep(tools.records.learned(self.round))
            raise Suspicion(self.partner, "did not take the step")
        if outcome == Outcome.OUTCOME_UNDECIDED:
            raise Suspicion(
                self.partner, "is gone, and with it the answer whether it took the step: asked when it is back"
            )

    async def _outcome_at_decider(self, digest: bytes) -> Outcome.ValueType:
        """Ask until there is an answer; UNDECIDED if the roster drops the decider first."""
        roster, vouch = self._tools.roster, self._tools.standing.vouch(self.partner, self.round)
        request = SettleRequest(
            round=self.round, meeting=self.name, yes=True, digest=digest, at=self._state.round, vouch=vouch
        )
        gone = roster.changed.until(lambda: not roster.alive(self.partner))
        outcome = await first_of(self._insist(request), gone, asyncio.sleep(PATIENCE))
        return Outcome.OUTCOME_UNDECIDED if outcome is None else outcome

    async def _insist(self, request: SettleRequest) -> Outcome.ValueType:
        backoff = Backoff()
        while True:
            try:
                reply = await self._tools.carrier.call(self.partner, SETTLE, request, 2 * ANSWER)
            except PeerLost as lost:
                log.warning("round %d: no answer from %s: %s", self.round, lost.node, lost.reason)
                await self._tools.roster.changed.wait(backoff.seconds())
                continue
            if reply.outcome != Outcome.OUTCOME_UNDECIDED:
                self._vouch = reply.vouch if reply.HasField("vouch") else None
                return reply.outcome


def merged(told: Mapping[str, Mapping[str, int]], weighing: Weighing) -> dict[str, int]:
    """The ledger of two sites together, from what each says, by node.

    For the two sites themselves it has what each says of itself; for others, the larger of the two counts. No count is
    more than can be true.
    """
    most = {node: max(ledger.get(node, 0) for ledger in told.values()) for ledger in told.values() for node in ledger}
    own = {node: ledger.get(node, 0) for node, ledger in told.items()}
    return weighing.plausible({**most, **own}, told.keys())
