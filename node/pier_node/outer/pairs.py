"""A site's NoLoCo rounds: meet one other site, take the pair's step with it or one's own alone, and go on.

What `Rounds` is for a round of all: it holds this site's state and moves it on. There is no keeper and no quorum; each
site has a state of its own, and nobody waits for more than one other. See docs/noloco.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from pier.v1.peer_pb2 import Chunk, MeetRequest
from pier_node.errors import PierError
from pier_node.outer.advance import advance_pair
from pier_node.outer.ahead import Ahead
from pier_node.outer.attempt import Advance, check_finite
from pier_node.outer.contribution import Contribution
from pier_node.outer.deal import Deal, PairTools
from pier_node.outer.meeting import Meetings, Met
from pier_node.outer.noloco import needs_anchors
from pier_node.outer.outcomes import Outcomes
from pier_node.outer.pairing import PairRun
from pier_node.outer.promises import to_the_end
from pier_node.outer.state import OuterState
from pier_node.outer.streams import EARLY
from pier_node.outer.suspicion import Suspicion
from pier_node.outer.times import Times
from pier_node.shared import Vector
from pier_node.wire.carrier import BadMessage

STALE = 8
"""Rounds behind the furthest from which on a site takes another's state rather than draw its partner back."""

log = logging.getLogger(__name__)


Saved = Callable[[], Awaitable[None]]


class Pairs:
    """One node's pairs: hold `state`, and move it on.

    Args:
        state: the last one of this site.
        nonce: a fresh name for an announcement.

    Attributes:
        saved: the round of the newest state that is on the disk, here or where it was fetched.
        sites: that must be there before this site's coming round begins.
        last_error: why the last meeting did not end in a common step, in words.
        spread: standard deviation between the replicas, as the last pair saw it; NaN: not known.
        times: where the time of the last round went, or goes.
    """

    def __init__(
        self,
        tools: PairTools,
        run: PairRun,
        state: OuterState,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(16),
    ) -> None:
        self.node = tools.node
        self.state = state
        self.saved = state.round
        self.sites = 1
        self.last_error = ""
        self.spread = math.nan
        self.times = Times()
        self._tools, self._run, self._nonce = tools, run, nonce
        self._roster, self._carrier = tools.roster, tools.carrier
        self._meetings = Meetings(self._carrier, self._roster, run.seed, lambda: self.state.round, tools.news)
        self._ahead = Ahead(
            self._carrier, self._roster, self._meetings.expected, lambda: self.state, tools.codec, tools.chunk
        )
        self._deal: Deal | None = None
        self._since = asyncio.get_running_loop().time()
        self._outcomes = Outcomes(tools, lambda: (self.state, self.saved), lambda: self._deal)
        self._carrier.serve_push(self._take_stream)

    @property
    def exchanging(self) -> bool:
        """Whether this site is in a meeting."""
        return self._deal is not None

    async def at_rest(self) -> None:
        """Return once this site is in no meeting."""
        await self._tools.news.until(lambda: self._deal is None)

    def offer(self, number: int, shadow: bool) -> OuterState | None:
        """What a peer may fetch from us: the last state (0, or its number), once it is on our disk; never a shadow."""
        known = self.saved == self.state.round and number in (0, self.saved)
        return self.state if known and not shadow else None

    async def adopt(self, state: OuterState) -> None:
        """Go on from another's state: what became of our own meetings does not matter any more."""
        self._settle(state)
        self.saved = state.round
        self._outcomes.forget()

    # --- which round, from where -----------------------------------------------------------------

    def coming(self) -> int:
        """The next round of this site."""
        return self._reachable(self.state.round + 1)

    def _reachable(self, number: int) -> int:
        """A round in which this site will meet somebody: this one, or, if it was overtaken, the next of those in front.

        Rounds differ a little between sites, and who is behind meets others that are. But a site whose partner has gone
        on, and whom some have overtaken by more than a round, would be alone for ever if it took one after the other.
        """
        furthest, pulse = self._furthest(), self._roster.pulse_of(self._meetings.expected(number))
        waits = pulse is not None and pulse.round < number
        return number if furthest <= number or waits else min(furthest + 1, self._run.last)

    def leaders(self) -> list[str]:
        """From whom this site should take its state before it goes on; mostly nobody.

        States differ, so that one of them has to give it all: another one every second, until one does.
        """
        if leader := self._outcomes.leader:
            return [leader]
        ahead = self._roster.ahead(self.state.round + STALE)
        return ahead[int(asyncio.get_running_loop().time()) % len(ahead) :][:1] if ahead else []

    def _furthest(self) -> int:
        ahead = self._roster.ahead(self.state.round)
        pulse = self._roster.pulse_of(ahead[0]) if ahead else None
        return pulse.round if pulse else self.state.round

    async def resolve(self) -> None:
        """Ask deciders that are back how the meetings ended of which this site does not know."""
        await self._outcomes.resolve()

    # --- a round -----------------------------------------------------------------------------------

    async def commit_alone(self, contribution: Contribution, advance: Advance) -> OuterState:
        """A round of the run's solo start."""
        state, tokens = self.state, {self.node: contribution.tokens}
        shadow: OuterState = await to_the_end(asyncio.to_thread(advance, state, contribution.vector, tokens))
        await self._commit_own(shadow, _nothing)
        return shadow

    async def commit(self, number: int, contribution: Contribution, saved: Saved) -> OuterState:
        """Take the next round, with a partner or alone.

        Args:
            number: the round that this site has trained for; it takes a later one if it was overtaken meanwhile.
            contribution: θ, less what no round has taken yet, and the tokens behind that.
            saved: makes the new state durable; awaited before anybody else may rely on it.

        Raises:
            PierError: the step is not finite, or cannot be saved.
        """
        self.times = Times()
        with self.times.spent_waiting():
            await self._roster.changed.until(lambda: self._is_open(number))
        await self._ahead.end()
        try:
            number = self._reachable(number)
            held: dict[str, Vector | None] = {}
            met = await self._meet(number, contribution, held)
            if met is None and self._reachable(number) > number:  # overtaken while it waited
                number = self._reachable(number)
                met = await self._meet(number, contribution, held)
            if met is None or not await self._together(met, contribution, held[met.node], saved):
                await self._alone(number, contribution, saved)
        finally:
            self._meetings.leave()
        self._tell()
        return self.state

    async def stop(self) -> None:
        """End what goes on while the workers train."""
        await self._ahead.end()

    def _is_open(self, number: int) -> bool:
        """Whether enough sites are there for a round, or somebody was seen beyond it."""
        pulses = [contact.pulse for contact in self._roster.contacts.values()]
        begun = any(pulse.round >= number for pulse in pulses if pulse)
        return begun or len(self._roster.participants()) >= self.sites

    async def _together(self, met: Met, contribution: Contribution, held: Vector | None, saved: Saved) -> bool:
        """Whether the step was taken with a partner."""
        deal = self._deal = Deal(self._tools, self.state, met, contribution, held)
        self._tools.news.notify()
        try:
            with self.times.spent_on_attempt():
                await deal.run(lambda shadow: self._commit_pair(deal, shadow, saved))
        except Suspicion as suspicion:
            self.last_error = f"round {deal.round}, with {met.node}: {suspicion}"
            log.warning("round %d: not taken with %s: %s", deal.round, met.node, suspicion)
            return False
        finally:
            self._deal = None
            self._tools.news.notify()
        return True

    async def _meet(self, number: int, contribution: Contribution, held: dict[str, Vector | None]) -> Met | None:
        """The partner; `held` takes the anchors of those who were told that we have theirs."""
        nonce, ledger = self._nonce(), self._ledger_with(contribution, number)

        def describe(node: str) -> MeetRequest:
            holds = self._ahead.digest_of(node)
            held[node] = self._ahead.anchor_of(node, holds)
            return MeetRequest(round=number, nonce=nonce, digest=self.state.digest, ledger=ledger, holds=holds)

        await self._tools.faults.reach(number, "ready")
        overtaken = number > self.state.round + 1
        # Those in front may have just begun: they need no longer than this site, which they have overtaken, has taken.
        allowance = asyncio.get_running_loop().time() - self._since if overtaken else 0.0
        with self.times.spent_waiting():
            return await self._meetings.find(number, describe, allowance)

    async def _alone(self, number: int, contribution: Contribution, saved: Saved) -> None:
        state, ledger, rates = self.state, self._ledger_with(contribution, number), self._tools.rates
        means = [contribution.vector]
        if contribution.error is not None:  # of a meeting that failed: now nothing is dropped
            contribution.error.fill(0)
        step = asyncio.to_thread(advance_pair, state, number, [self.node], means, ledger, rates)
        shadow = await to_the_end(step)
        await self._commit_own(shadow, saved)

    def _ledger_with(self, contribution: Contribution, number: int) -> dict[str, int]:
        ledger = self.state.ledger
        ours = {self.node: ledger.get(self.node, 0) + contribution.tokens}
        return self._tools.weighing(number).plausible({**ledger, **ours}, ours)

    # --- what others say -----------------------------------------------------------------------

    async def _take_stream(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        first = await anext(chunks, None)
        if first is None:
            raise BadMessage("an empty stream")
        if first.stage == Chunk.STAGE_ANCHOR and needs_anchors(self._tools.rates):
            await self._ahead.take(sender, first, chunks)
        elif first.stage == Chunk.STAGE_SWAP:
            deal = await self._deal_of(first)
            await deal.swap.take(sender, first, chunks)
        else:
            raise BadMessage("a stream that pairs do not send")

    async def _deal_of(self, first: Chunk) -> Deal:
        """The meeting that a stream belongs to: it may come a moment before we know that we have met."""

        def settled() -> bool:
            return bool(self._deal and self._deal.round >= first.round) or self._meetings.is_over(first.round)

        try:
            async with asyncio.timeout(EARLY):
                await self._tools.news.until(settled)
        except TimeoutError as error:
            raise BadMessage("no such meeting") from error
        if self._deal is None or self._deal.name != first.meeting:
            raise BadMessage("that meeting is over")
        return self._deal

    # --- how a round ends ------------------------------------------------------------------------

    async def _commit_pair(self, deal: Deal, shadow: OuterState, saved: Saved) -> None:
        self.spread, self.last_error = deal.swap.spread, ""
        await self._commit(shadow, saved)

    async def _commit_own(self, shadow: OuterState, saved: Saved) -> None:
        try:
            await check_finite(shadow)
        except Suspicion as error:
            raise PierError(
                f"round {shadow.round}: training diverged: the weights are not finite any more",
                "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
            ) from error
        await to_the_end(asyncio.to_thread(lambda: shadow.digest))
        await self._commit(shadow, saved)

    async def _commit(self, shadow: OuterState, saved: Saved) -> None:
        self._settle(shadow)
        await self._tools.faults.reach(shadow.round, "committed")
        await saved()

    def _settle(self, state: OuterState) -> None:
        self.state, self._since = state, asyncio.get_running_loop().time()
        self._tools.news.notify()
        self._roster.changed.notify()

    def _tell(self) -> None:
        """Tell all that a round is over, and the next partner our anchor, without waiting for anybody."""
        self._roster.tell()
        if needs_anchors(self._tools.rates) and self.state.round < self._run.last:
            self._ahead.begin(self.coming())


async def _nothing() -> None:
    """Of a round that is saved later, because nobody waits for it."""
