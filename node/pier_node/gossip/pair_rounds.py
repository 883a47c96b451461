"""A site's NoLoCo rounds: meet one other site, take the pair's step with it or a step alone, and continue.

`PairRounds` is what `Rounds` is in a run of atomic rounds: it holds this site's state and advances it. There is no
leader and no quorum; each site has its own state, and no site waits for more than one other. See docs/noloco.md.

`Outcomes` knows how past meetings ended. It answers sites that were left without an answer, and asks about meetings of
which this site does not know the end. If the two sites of a pair have different records, one of them was gone while the
other continued. Then the site that is behind takes the other's state; if neither is behind, the site that was in doubt
does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector
from pier_node.base.tasks import run_to_end
from pier_node.base.tracing import span
from pier_node.gossip.exchange import Prefetch
from pier_node.gossip.pair_commit import Doubt, Outcome, PairCommit, PairTools
from pier_node.gossip.rendezvous import Met, Rendezvous
from pier_node.gossip.standing import Chain
from pier_node.outer.advance import advance_pair
from pier_node.outer.mean import Update
from pier_node.outer.noloco import needs_anchors
from pier_node.outer.state import OuterState
from pier_node.outer.times import Times
from pier_node.rounds.attempt import Advance, check_finite, heard_of
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import SETTLE, BadMessage, Chunk, PeerLost
from pier_proto.v1.peer_pb2 import MeetRequest, SettleReply, SettleRequest

FOLLOW = 60.0
"""Seconds for which a site tries to take the state of a partner whose record differs from its own."""
LOOK_BACK = 5.0
"""Longest time in seconds for a question about an earlier round."""

log = logging.getLogger(__name__)


class Outcomes:
    """What one site knows about its past meetings.

    Args:
        here: returns this site's state, and the round of the newest state on its disk.
        pair_commit: returns the meeting under way.
    """

    def __init__(
        self, tools: PairTools, here: Callable[[], tuple[OuterState, int]], pair_commit: Callable[[], PairCommit | None]
    ) -> None:
        self._tools, self._here, self._pair_commit = tools, here, pair_commit
        self._source, self._until = "", 0.0
        tools.carrier.serve(SETTLE, self._answer)

    @property
    def source(self) -> str:
        """The site whose state this site has to take; "" if there is none, or no longer one."""
        waits = asyncio.get_running_loop().time() < self._until and self._tools.roster.alive(self._source)
        return self._source if waits else ""

    async def forget(self) -> None:
        """Continue from another site's state: the outcomes of this site's own meetings no longer matter.

        Raises PierError.
        """
        self._source, self._until = "", 0.0
        if self._tools.records.doubts:
            await self._tools.keep(replace(self._tools.records, doubts={}))

    async def resolve(self) -> None:
        """Ask deciders that are back how the meetings ended whose outcome this site does not know."""
        tools, (state, _) = self._tools, self._here()
        if tools.node in state.members:
            for partner in {*state.members} - {tools.node, tools.records.partners.get(state.round)}:
                # It went down between the state and the record, and the next state will name others.
                await tools.keep(tools.records.took(state.round, partner))
        for doubt in list(tools.records.doubts.values()):
            if tools.roster.alive(doubt.decider):
                await self._ask(doubt, state.round)

    async def _ask(self, doubt: Doubt, at: int) -> None:
        request = SettleRequest(
            round=doubt.round, meeting=doubt.meeting, yes=True, digest=doubt.digest, left=True, at=at
        )
        try:
            reply = await self._tools.carrier.call(doubt.decider, SETTLE, request, LOOK_BACK)
        except PeerLost as lost:
            log.info("round %d: %s cannot say yet how it ended: %s", doubt.round, lost.node, lost.reason)
            return
        if reply.outcome == Outcome.OUTCOME_COMMITTED and reply.at >= at:
            self._follow(doubt.round, doubt.decider)
        elif reply.outcome != Outcome.OUTCOME_UNDECIDED:
            await self._tools.keep(self._tools.records.learned(doubt.round))

    async def _answer(self, sender: str, request: SettleRequest) -> SettleReply:
        if sender < self._tools.node:
            raise BadMessage("of the two it is the one that decides")
        pair_commit = self._pair_commit()
        if pair_commit and (pair_commit.name, pair_commit.partner) == (request.meeting, sender):
            outcome = await pair_commit.answer(request)
        else:
            outcome = Outcome.OUTCOME_COMMITTED if self._took(request.round, sender) else Outcome.OUTCOME_REFUSED
        vouch = self._tools.standing.vouch(sender, request.round) if outcome == Outcome.OUTCOME_COMMITTED else None
        reply = SettleReply(outcome=outcome, at=self._here()[0].round, vouch=vouch)
        if request.left and outcome == Outcome.OUTCOME_COMMITTED and request.at > reply.at:
            self._follow(request.round, sender)
        return reply

    def _took(self, round: int, partner: str) -> bool:
        """Whether the step of a round was taken with a partner, and is on disk."""
        state, saved = self._here()
        last = saved == state.round == round and partner in state.members
        return last or self._tools.records.partners.get(round) == partner

    def _follow(self, round: int, node: str) -> None:
        log.warning("round %d: its step was taken by one of us two only: going on from the state of %s", round, node)
        self._source, self._until = node, asyncio.get_running_loop().time() + FOLLOW


STALE = 8
"""A site more than this many rounds behind the run takes a state, so as not to pull its partner back."""


Saved = Callable[[], Awaitable[None]]


class PairRounds:
    """One node's pairs: it holds `state` and advances it.

    Args:
        last: the last round of the run.
        nonce: returns a fresh name for an announcement.

    Attributes:
        saved: the round of the newest state that is on disk, here or where it was fetched.
        sites: number of sites that must be there before this site's coming round begins.
        last_error: why the last meeting did not end in a common step, in words.
        spread: standard deviation between the replicas as seen in the last pair; NaN if it is not known.
        times: how the last or current round spends its time.
    """

    def __init__(
        self,
        tools: PairTools,
        seed: int,
        last: int,
        state: OuterState,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(16),
    ) -> None:
        self.node, self.state, self.saved = tools.node, state, state.round
        self.sites, self.last_error, self.spread, self.times = 1, "", math.nan, Times()
        self._tools, self._last, self._nonce = tools, last, nonce
        self._roster, self._carrier = tools.roster, tools.carrier
        self.standing = tools.standing
        self._rendezvous = Rendezvous(self._carrier, tools.standing, seed, lambda: self.state.round, tools.news)
        self._ahead = Prefetch(
            self._carrier, self._roster, self._rendezvous.expected, lambda: self.state, tools.codec, tools.chunk
        )
        self._pair_commit: PairCommit | None = None
        self._since = asyncio.get_running_loop().time()
        self._outcomes = Outcomes(tools, lambda: (self.state, self.saved), lambda: self._pair_commit)
        self._carrier.serve_push(self._take_stream)

    @property
    def vouches(self) -> Chain:
        """The chain that gives this site its standing, for its pulse."""
        return self._tools.records.vouches

    @property
    def exchanging(self) -> bool:
        """Whether this site is in a meeting."""
        return self._pair_commit is not None

    async def at_rest(self) -> None:
        """Return once this site is in no meeting."""
        await self._tools.news.until(lambda: self._pair_commit is None)

    @property
    def decided(self) -> OuterState:
        """The last state; see `rounds.member.Rounds`."""
        return self.state

    async def until_decided(self, round: int, work: asyncio.Task[bool]) -> None:  # noqa: ARG002
        """Return once the work is done: in pairs, no round is decided before."""
        await asyncio.wait([work])

    def offer(self, number: int, shadow: bool) -> OuterState | None:
        """What a peer may fetch from us: the last state (by its number, or 0) once it is on disk; never a shadow."""
        known = self.saved == self.state.round and number in (0, self.saved)
        return self.state if known and not shadow else None

    async def adopt(self, state: OuterState) -> None:
        """Continue from another site's state, which is on the disk: the outcomes of our own meetings no longer matter.

        Raises PierError.
        """
        self._settle(state)
        self.saved = state.round
        await self._outcomes.forget()

    # --- which round, from where -----------------------------------------------------------------

    def coming(self) -> int:
        """The next round of this site."""
        return self._reachable(self.state.round + 1)

    def _reachable(self, number: int) -> int:
        """A round in which this site will meet another: this one, or if the run has overtaken it, the run's next one.

        Rounds differ a little between sites, and a site that is behind meets others that are. But if its partner has
        moved on and half of the others have overtaken it by more than a round, it would be alone forever if it took one
        round after another.
        """
        reached, pulse = self.standing.reached(), self._roster.pulse_of(self._rendezvous.expected(number))
        waits = pulse is not None and pulse.round < number
        return number if reached <= number or waits else min(reached + 1, self._last)

    def sources(self) -> list[str]:
        """The sites from whose states this site should continue, if there are any: see gossip/catch_up.py."""
        if source := self._outcomes.source:
            return [source]
        return self.standing.beyond(self.state.round + STALE)

    async def resolve(self) -> None:
        """Ask deciders that are back how the meetings ended whose outcome this site does not know."""
        await self._outcomes.resolve()

    # --- a round -----------------------------------------------------------------------------------

    async def commit_alone(self, update: Update, advance: Advance) -> OuterState:
        """Commit a round of the run's solo start."""
        state, tokens = self.state, {self.node: update.tokens}
        shadow = await run_to_end(asyncio.to_thread(lambda: advance(state, update.copied(), tokens)))
        await self._commit_own(shadow, _nothing)
        return shadow

    async def commit(self, number: int, update: Update, saved: Saved, sites: int = 1) -> OuterState:
        """Take the next round, with a partner or alone.

        Args:
            number: the round that this site has trained for; it takes a later one if it was overtaken meanwhile.
            update: the weights that the pair swaps: φ minus the unsent update Δ; and the tokens behind Δ.
            saved: makes the new state durable; awaited before any other site may rely on it.
            sites: number of sites that must be there before the round begins.

        Raises:
            PierError: the step is not finite, or cannot be saved.
        """
        self.times, self.sites = Times(), sites
        with self.times.spent_waiting():
            await self._roster.changed.until(lambda: self._is_open(number))
        await self._ahead.end()
        try:
            number = self._reachable(number)
            held: dict[str, Vector | None] = {}
            met = await self._meet(number, update, held)
            if met is None and self._reachable(number) > number:  # overtaken while it waited
                number = self._reachable(number)
                met = await self._meet(number, update, held)
            if met is None or not await self._together(met, update, held[met.node], saved):
                await self._alone(number, update, saved)
        finally:
            self._rendezvous.leave()
        self._tell()
        return self.state

    async def stop(self) -> None:
        """Stop what runs while the workers train."""
        await self._ahead.end()

    def _is_open(self, number: int) -> bool:
        """Whether enough sites are here for a round, or some site was seen beyond it."""
        begun = any(pulse.round >= number for pulse in self.standing.peers().values())
        return begun or len(self._roster.participants()) >= self.sites

    async def _together(self, met: Met, update: Update, held: Vector | None, saved: Saved) -> bool:
        """Take the step with a partner; return whether it was taken."""
        pair_commit = self._pair_commit = PairCommit(self._tools, self.state, met, update, held)
        self._tools.news.notify()
        try:
            with self.times.spent_on_attempt():
                await pair_commit.run(lambda shadow: self._commit_pair(pair_commit, shadow, saved))
        except Suspicion as suspicion:
            self.last_error = f"round {pair_commit.round}, with {met.node}: {suspicion}"
            log.warning("round %d: not taken with %s: %s", pair_commit.round, met.node, suspicion)
            return False
        finally:
            self._pair_commit = None
            self._tools.news.notify()
        return True

    async def _meet(self, number: int, update: Update, held: dict[str, Vector | None]) -> Met | None:
        """Meet the partner; `held` receives the anchors of sites that were told that we have theirs."""
        nonce, ledger = self._nonce(), self._ledger_with(update, number)

        def describe(node: str) -> MeetRequest:
            holds = self._ahead.digest_of(node)
            held[node] = self._ahead.anchor_of(node, holds)
            return MeetRequest(round=number, nonce=nonce, digest=self.state.digest, ledger=ledger, holds=holds)

        await self._tools.faults.reach(number, "ready")
        overtaken = number > self.state.round + 1
        # Sites in front may have just begun. They need no longer than this site, which they have overtaken, has taken.
        allowance = asyncio.get_running_loop().time() - self._since if overtaken else 0.0
        with self.times.spent_waiting():
            return await self._rendezvous.find(number, describe, allowance)

    async def _alone(self, number: int, update: Update, saved: Saved) -> None:
        state, ledger, rates = self.state, self._ledger_with(update, number), self._tools.rates
        means = [update.vector]
        if update.error is not None:  # left by a failed meeting; now nothing is dropped
            update.error[:] = 0.0
        with span("outer step"):
            step = asyncio.to_thread(advance_pair, state, number, [self.node], means, ledger, rates)
            shadow = await run_to_end(step)
        await self._commit_own(shadow, saved)

    def _ledger_with(self, update: Update, number: int) -> dict[str, int]:
        ledger = self.state.ledger
        ours = {self.node: ledger.get(self.node, 0) + update.tokens}
        return self._tools.weighing(number).plausible({**ledger, **ours}, ours)

    # --- what others say -----------------------------------------------------------------------

    async def _take_stream(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        first = await anext(chunks, None)
        if first is None:
            raise BadMessage("an empty stream")
        if first.stage == Chunk.STAGE_ANCHOR and needs_anchors(self._tools.rates):
            await self._ahead.take(sender, first, chunks)
        elif first.stage == Chunk.STAGE_SWAP:
            pair_commit = await self._commit_of(first)
            await pair_commit.swap.take(sender, first, chunks)
        else:
            raise BadMessage("a stream that pairs do not send")

    async def _commit_of(self, first: Chunk) -> PairCommit:
        """The meeting that a stream belongs to; a stream may arrive a moment before we know that we have met."""

        def settled() -> bool:
            return bool(self._pair_commit and self._pair_commit.round >= first.round) or self._rendezvous.is_over(
                first.round
            )

        await heard_of("meeting", self._tools.news, settled)
        if self._pair_commit is None or self._pair_commit.name != first.meeting:
            raise BadMessage("that meeting is over")
        return self._pair_commit

    # --- how a round ends ------------------------------------------------------------------------

    async def _commit_pair(self, pair_commit: PairCommit, shadow: OuterState, saved: Saved) -> None:
        self.spread, self.last_error = pair_commit.swap.spread, ""
        await self._commit(shadow, saved)

    async def _commit_own(self, shadow: OuterState, saved: Saved) -> None:
        try:
            await check_finite(shadow)
        except Suspicion as error:
            raise PierError(
                f"round {shadow.round}: training diverged: the weights are not finite any more",
                "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
            ) from error
        await run_to_end(asyncio.to_thread(lambda: shadow.digest))
        await self._commit(shadow, saved)

    async def _commit(self, shadow: OuterState, saved: Saved) -> None:
        before = self.state
        self._settle(shadow)
        await self._tools.faults.reach(shadow.round, "committed")
        try:
            await saved()
        except PierError:  # what is not on the disk did not happen: others hear so, and the last checkpoint agrees
            self._settle(before)
            raise

    def _settle(self, state: OuterState) -> None:
        self.state, self._since = state, asyncio.get_running_loop().time()
        self._tools.news.notify()
        self._roster.changed.notify()

    def _tell(self) -> None:
        """Tell all sites that a round is over, and send the next partner our anchor, without waiting for anyone."""
        self._roster.tell()
        if needs_anchors(self._tools.rates) and self.state.round < self._last:
            self._ahead.begin(self.coming())


async def _nothing() -> None:
    """Do nothing: this round is saved later, because no site waits for it."""
