"""One attempt at a round: exchange, stage, vote, and wait for everyone's votes.

It ends in a decided shadow or in a Suspicion, and changes nothing by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.patience import LearnedWait
from pier_node.base.shared import SharedVector, Vector
from pier_node.base.tasks import Signal, first_of, run_to_end
from pier_node.base.tracing import span
from pier_node.outer.codec.interface import Codec, Plain
from pier_node.outer.mean import Mean, Update, Weighing, norm_limit, weighted_mean
from pier_node.outer.state import ANCHOR, OuterState, distance, l2_norm
from pier_node.rounds.commitments import Cast, Journal, Promises
from pier_node.rounds.double_votes import VoteBook, remembers
from pier_node.rounds.exchange_plan import CHUNK, Plan
from pier_node.rounds.means import Means
from pier_node.rounds.proofs import Proofs, plan_name
from pier_node.rounds.quorum import has_quorum, needed, order
from pier_node.rounds.reduce import Codes, Reduction
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.rounds.suspects import NOBODY, Suspicion
from pier_node.rounds.witness import Ask
from pier_node.wire.carrier import ABORT, VOTE, BadMessage, Carrier, Method, PeerLost, Q
from pier_proto.v1 import peer_pb2 as pb

TELL_TIMEOUT = 10.0
TELLS = 3
REASON = 1000
"""Longest reason that others are told, in characters: wire/bounds.py limits the message."""

log = logging.getLogger(__name__)

Advance = Callable[[OuterState, SharedVector, Mapping[str, int]], OuterState]
"""(last state, mean, tokens by member) -> next state, with the same bits at every member; it may keep the mean."""


@dataclass
class Tools:
    """What rounds and attempts work with.

    Attributes:
        keep: returns once a committed state would survive a power cut. Raises PierError.
        means: keeps the encoded means of committed rounds for sites that missed them; None: it does not.
        fetch_shadow: (holders, round, value) -> the staged result, from its holders. Raises PeerLost.
        convict: excludes the node that a double vote convicts.
        ask_witness: asks the run's witness for its vote; None: the run has none.
        news: notified when a vote, an abort or a new attempt arrives.
        silence: learns how long members keep each other waiting.
        weighing: how much members' tokens count in a round, by round number.
    """

    carrier: Carrier
    roster: Roster
    statements: Statements
    journal: Journal
    proofs: Proofs
    keep: Callable[[OuterState], Awaitable[None]]
    fetch_shadow: Callable[[Collection[str], int, pb.Value], Awaitable[OuterState]]
    faults: Faults = NO_FAULTS
    codec: Codec = field(default_factory=Plain)
    chunk: int = CHUNK
    mean: Mean = weighted_mean
    weighing: Callable[[int], Weighing] = lambda _: Weighing()
    convict: Callable[[pb.DoubleVote], None] = lambda _: None
    means: Means | None = None
    ask_witness: Ask | None = None

    def __post_init__(self) -> None:
        self.node = self.carrier.node
        self.news = Signal()
        self.votes = VoteBook()
        self.silence = LearnedWait(initial=30.0, floor=10.0)
        self.bandwidth = 0.0
        self._room = SharedVector(0)
        self._messages: set[asyncio.Task[None]] = set()

    def room(self, length: int) -> SharedVector:
        """Memory for a mean, shape [length]. Attempts that fail leave it to the next one."""
        if len(self._room.array) != length:
            self._room = SharedVector.scratch(length)
        return self._room

    def release_room(self) -> None:
        """The mean is complete, and its memory belongs to the next state."""
        self._room = SharedVector(0)

    async def tell(self, node: str, method: Method[Q, pb.Ack], message: Q) -> None:
        """Send a message, again if it is lost; a node that still misses it learns so when it asks the leader again."""
        for _ in range(TELLS):
            try:
                await self.carrier.call(node, method, message, TELL_TIMEOUT)
                return
            except PeerLost as lost:
                log.info("could not tell %s: %s", lost.node, lost.reason)

    def beside(self, message: Coroutine[Any, Any, None]) -> None:
        """Send a message while this site goes on: somebody who does not answer must not hold it up."""
        task = asyncio.create_task(message)
        self._messages.add(task)

        def sent(task: asyncio.Task[None]) -> None:
            self._messages.discard(task)
            if not task.cancelled() and (error := task.exception()):
                log.error("a message to the other members failed: %r", error)

        task.add_done_callback(sent)


class Attempt:
    """This site's part in an attempt.

    Args:
        promises: this site's commitments; the proposal's ballot is already promised.

    Attributes:
        began: when it began, in seconds of the loop's clock.
    """

    def __init__(
        self, tools: Tools, state: OuterState, promises: Promises, proposal: pb.Proposal, mine: pb.Ready
    ) -> None:
        self._tools, self._state, self._promises, self._proposal = tools, state, promises, proposal
        self.round, self.ballot, self._mine = proposal.round, proposal.ballot, mine
        self._adopts = proposal.HasField("adopt")
        self.began = asyncio.get_running_loop().time()
        self.group = tuple(share.node for share in proposal.shares)
        claims = {share.node: share.tokens for share in proposal.shares}
        self._weighing = tools.weighing(proposal.round)
        self._tokens = self._weighing.believed(claims, state.ledger)
        self.reduction: Reduction | None = None
        self._aborted: Suspicion | None = None
        self._acknowledged = False  # whether all members have taken what we sent

    @property
    def clipped(self) -> Mapping[str, float]:
        """Clipping factor by node, for members whose update is longer than allowed."""
        return self.reduction.clips if self.reduction else {}

    @property
    def codes(self) -> Codes:
        """The mean of the updates as it travelled, by the first element of each chunk; empty if it was not encoded."""
        return self.reduction.codes if self.reduction and not self._adopts else {}

    async def run(self, update: Update, advance: Advance) -> tuple[OuterState, pb.Link]:
        """The decided shadow and the votes that prove it. Raises Suspicion.

        Others acknowledge what we send while we go on: the vote of each says that it has all of it.
        """
        mean = self._tools.room(len(update.vector))
        reduction = self.reduction = self._reduction(update, mean.array)
        self._tools.news.notify()
        return await first_of(
            self._decide(reduction, mean, advance), self._failure_of(reduction), self._until_aborted()
        )

    async def _decide(self, reduction: Reduction, mean: SharedVector, advance: Advance) -> tuple[OuterState, pb.Link]:
        with span("exchange"):
            await reduction.complete.wait()
        if self._adopts:
            adopted = self._proposal.adopt
            shadow = await self._adopted(adopted)
            known = sorted({*adopted.members, *self.group})
            value = pb.Value(origin=adopted.origin, digest=adopted.digest, members=known)
        else:
            self._tools.silence.saw(reduction.longest_wait)
            self._tools.bandwidth = reduction.meter.rate()
            with span("outer step"):
                self._tools.release_room()
                shadow = await run_to_end(asyncio.to_thread(advance, self._state, mean, self._tokens))
                await check_finite(shadow)
            value = pb.Value(origin=self.ballot, digest=shadow.digest, members=shadow.members)
        await self._tools.faults.reach(shadow.round, "staged")
        with span("vote"):
            vote, signed = await self._cast(value, shadow)
            self._tools.beside(self._tell(signed))
            votes = await self._await_votes(vote)
        for node, factor in self.clipped.items():
            log.warning("round %d: the update of %s was clipped to %.2g of its length", shadow.round, node, factor)
        return shadow, self._link(shadow, votes)

    def close(self) -> None:
        """Let go of the last state: its memory is needed, and what was under way may refer to this attempt longer."""
        del self._state

    def abort(self, sender: str, notice: pb.AbortNotice) -> None:
        """Note that another member gave up."""
        reason = f"{sender} gave up: {notice.suspect or 'itself'}: {notice.reason}"
        self._aborted = Suspicion(NOBODY, reason, told=(sender, notice.suspect))
        self._tools.news.notify()

    async def give_up(self, suspicion: Suspicion) -> None:
        """Tell all others why we give up, so that they do not wait for us; the suspect may be alive and well."""
        if self._aborted is not None:
            return
        notice = pb.AbortNotice(
            node=self._tools.node,
            round=self._proposal.round,
            ballot=self.ballot,
            suspect=suspicion.node
            or next(iter(suspicion.told), NOBODY),  # a node that only refused still had a part in it
            reason=suspicion.reason[:REASON],
        )
        others = [node for node in self.group if node != self._tools.node]
        await asyncio.gather(*(self._tools.tell(node, ABORT, notice) for node in others))

    def _reduction(self, update: Update, mean: Vector) -> Reduction:
        """The exchange. Members that adopt a result exchange no data, but nobody votes before all have taken part."""
        tools = self._tools
        plan = Plan(
            round=self._proposal.round,
            ballot=self.ballot,
            shares=[pb.Share(node=node) for node in self.group] if self._adopts else self._believed(),
            norm_limit=norm_limit(self._state.norm),
            silence=tools.silence.seconds(),
            chunk=tools.chunk,
            weighing=self._weighing,
        )
        return Reduction(tools.carrier, plan, update, mean, tools.codec, tools.faults, tools.mean)

    def _believed(self) -> list[pb.Share]:
        """The shares, with tokens reduced to what can be true: every member gets the same ones."""
        shares = [pb.Share.FromString(share.SerializeToString()) for share in self._proposal.shares]
        for share in shares:
            share.tokens = self._tokens[share.node]
        return shares

    async def _adopted(self, value: pb.Value) -> OuterState:
        held = self._promises.shadow
        if held and held.digest == value.digest:
            return held
        try:
            shadow = await self._tools.fetch_shadow(self._proposal.holders, self._proposal.round, value)
        except PeerLost as lost:
            raise Suspicion(lost.node, f"could not hand over its result: {lost.reason}") from lost
        self._check_members(shadow, value)
        await self._check_length_of_step(shadow)
        return shadow

    def _check_members(self, shadow: OuterState, value: pb.Value) -> None:
        """Refuse a result that counts members which took part in no attempt at it, or tokens that we did not bring."""
        strange = {*shadow.members} - {*value.members} or not self._can_have_made({*shadow.members}, value.origin)
        ours = [key for key in {*shadow.ledger, *self._state.ledger} if key.partition("/")[0] == self._tools.node]
        risen = any(shadow.ledger.get(key, 0) != self._state.ledger.get(key, 0) for key in ours)
        if strange or (risen and self._tools.node not in shadow.members):
            raise Suspicion(self._proposal.holders[0], "its result is not of the sites that took part in it")

    def _can_have_made(self, members: set[str], origin: pb.Ballot) -> bool:
        """Whether these can have been the members of the attempt under this ballot, which carried a quorum.

        Every member of our attempt reaches the same verdict, because it rests on the announcements alone: each says
        whether its node was in that attempt, and whether it has given votes away. If not, nobody else had its vote.
        """
        read, base = self._tools.statements.read, self._tools.statements.base(self._state.members)
        here = {signed.node: read(pb.Ready, signed) for signed in self._proposal.readies}
        givers = {signed.node for ready in here.values() for signed in ready.handovers}
        took_part = all(order(here[node].seen) >= order(origin) for node in members & here.keys())
        return took_part and has_quorum(base.votes - (here.keys() - givers - members), base)

    async def _check_length_of_step(self, shadow: OuterState) -> None:
        """Refuse a result further from our state than a round can lead: nobody knows who made it. Raises Suspicion."""

        def longest() -> float:
            others = [l2_norm(vector.array) for name, vector in shadow.tensors.items() if name != ANCHOR]
            return float(np.max([distance(shadow.anchor, self._state.anchor), *others]))  # NaN if any of them is

        limit, found = norm_limit(self._state.norm), await asyncio.to_thread(longest)
        if not found <= limit:
            holder = self._proposal.holders[0]
            raise Suspicion(holder, f"its result is a step of {found:.3g}; a round can take at most {limit:.3g}")

    async def _cast(self, value: pb.Value, shadow: OuterState) -> tuple[pb.Vote, pb.Signed]:
        """Vote, and write that down. Returns the vote, also as the others get it."""
        tools, ballot = self._tools, self.ballot
        await self._promises.cast(Cast.of(ballot, value), shadow)
        await tools.faults.reach(shadow.round, "journaled")
        vote = pb.Vote(
            node=tools.node,
            round=shadow.round,
            ballot=ballot,
            digest=shadow.digest,
            plan=plan_name(self._mine.base, ballot, self.group, shadow.members),
            prior=self._mine.voted_in if self._mine.HasField("voted") else None,
            prior_digest=self._mine.voted.digest,
        )
        signed = tools.statements.seal(vote)
        tools.votes.count(vote, signed, self.group)
        return vote, signed

    async def _tell(self, vote: pb.Signed) -> None:
        tools = self._tools
        others = [node for node in self.group if node != tools.node]
        if tools.faults.planned:  # a fault strikes when one member alone has heard
            await asyncio.gather(*(tools.tell(node, VOTE, vote) for node in others[:1]))
            await tools.faults.reach(self._proposal.round, "voting")
            del others[:1]
        await asyncio.gather(*(tools.tell(node, VOTE, vote) for node in others))

    async def _await_votes(self, ours: pb.Vote) -> Sequence[pb.Signed]:
        """The votes of all members, once they are here and equal to ours. Raises Suspicion."""
        tools, loop = self._tools, asyncio.get_running_loop()
        began = loop.time()
        while missing := [node for node in self.group if node not in tools.votes.of(self.ballot)]:
            if dead := [node for node in missing if not tools.roster.stayed(node, self.began)]:
                raise Suspicion(dead[0], "lost before it voted")
            if not self._acknowledged:  # it may still wait for what we sent, whose own limit is longer
                began = loop.time()
            if loop.time() - began > tools.silence.seconds():
                raise Suspicion(missing[0], f"did not vote for {tools.silence.seconds():.0f} s", mute=True)
            await tools.news.wait(1.0)
        tools.silence.saw(loop.time() - began)
        votes = tools.votes.of(self.ballot)
        wrong = [node for node in self.group if (votes[node].digest, votes[node].plan) != (ours.digest, ours.plan)]
        if wrong:
            raise Suspicion(wrong[0], "voted for a different result than ours")
        statements = tools.statements
        told = {signed.node: statements.read(pb.Ready, signed) for signed in self._proposal.readies}
        if forgetful := [node for node in self.group if not remembers(votes[node], told[node])]:
            raise Suspicion(forgetful[0], "its vote and its announcement name different earlier votes")
        return tools.votes.signed(self.ballot, self.group)  # later votes of a liar may push them out of the book

    def _link(self, shadow: OuterState, votes: Sequence[pb.Signed]) -> pb.Link:
        """The link: the votes of all members, as proof for others."""
        read = self._tools.statements.read
        announced = [read(pb.Ready, it) for it in self._proposal.readies]
        signed = {it.statement: it for ready in announced for it in ready.handovers}
        told = {name: read(pb.Handover, it) for name, it in signed.items()}
        ours = [it for it in told.values() if (it.round + 1, it.base) == (shadow.round, self._mine.base)]
        few = needed(self.group, self._tools.statements.base(self._state.members), ours)
        return pb.Link(
            round=shadow.round,
            digest=shadow.digest,
            base=self._mine.base,
            ballot=self.ballot,
            members=shadow.members,
            votes=votes,
            handovers=[signed[name] for name, it in told.items() if it in few],
        )

    async def _failure_of(self, reduction: Reduction) -> NoReturn:
        """Run an exchange, and raise what goes wrong in it; if nothing does, wait for ever."""
        await reduction.run()
        self._acknowledged = True
        await asyncio.Event().wait()
        raise AssertionError

    async def _until_aborted(self) -> NoReturn:
        await self._tools.news.until(lambda: self._aborted is not None)
        assert self._aborted
        raise self._aborted


async def check_finite(shadow: OuterState) -> None:
    """Refuse to vote for a result that contains a NaN or an infinity; also computes its digest. Raises Suspicion."""

    def is_finite() -> bool:
        _ = shadow.digest, shadow.norm  # here, away from the event loop: votes and the next round need them
        return shadow.finite

    if not await asyncio.to_thread(is_finite):
        raise Suspicion(NOBODY, "the result is not finite")


EARLY = 30.0
"""Seconds for which a stream of an attempt that we have not heard of yet may wait for us."""


async def heard_of(what: str, news: Signal, settled: Callable[[], bool]) -> None:
    """Return once `settled()` holds: a stream may arrive a moment before we know what it belongs to.

    Raises:
        BadMessage: it does not hold after EARLY seconds, so there is no such attempt or meeting.
    """
    try:
        async with asyncio.timeout(EARLY):
            await news.until(settled)
    except TimeoutError as error:
        raise BadMessage(f"no such {what}") from error
