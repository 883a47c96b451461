"""The member's side of an atomic round: announce, take part in an attempt, and commit, or retry with the survivors.

A member commits in two ways only: with equal votes from every member of the attempt, or by learning that some site
committed exactly the result that it holds. Otherwise nothing changes, and the site keeps its update. docs/protocol.md
describes the states and messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

from pier_node.base.errors import PierError
from pier_node.base.patience import Backoff, LearnedWait
from pier_node.base.tasks import first_of, run_to_end
from pier_node.base.tracing import span
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.outer.times import Times
from pier_node.rounds.attempt import Advance, Attempt, Tools, check_finite, heard_of
from pier_node.rounds.commitments import Promises, Superseded
from pier_node.rounds.double_votes import Disputes
from pier_node.rounds.leader import BUSY, POLL, Leader, LeaderView, read_announcement, waiting_level
from pier_node.rounds.proofs import ProgressChecks, Trust, Trusted, alone
from pier_node.rounds.quorum import flaw, has_quorum, leader_of, order
from pier_node.rounds.reduce import Codes, Reduction
from pier_node.rounds.suspects import Behind, Involved, Standstill, Suspects, Suspicion
from pier_node.rounds.witness import Ask, handover_of, vote_of_witness
from pier_node.wire.carrier import ABORT, GATHER, VOTE, BadMessage, Chunk, PeerLost
from pier_proto.v1.peer_pb2 import AbortNotice, Ack, Handover, Link, Proposal, Ready, Signed, Vote, WitnessRequest

NO_CODES: Codes = {}
REFUSED = 1.0
"""A call that fails within so many seconds was refused; a slower one went unanswered."""

log = logging.getLogger(__name__)


class Rounds:
    """One node's rounds: it holds `state` and advances it together with the others.

    Args:
        state: the last committed state, which is on disk.
        length: number of elements that a round syncs, by round number.
        nonce: returns a fresh name for an announcement.

    Attributes:
        state: the last committed state that is on this site's disk: what others may be told.
        decided: the last state that is decided. `state` follows when it is on the disk.
        sites: least number of members that the coming round must have.
        last_error: why the last attempt did not end in a commit, in words.
        times: how the last or current round spends its time.
        clipped: clipping factor by node, for members whose update was clipped in the last round.
    """

    def __init__(
        self,
        tools: Tools,
        state: OuterState,
        length: Callable[[int], int],
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(16),
    ) -> None:
        self.node = tools.node
        self.state = self.decided = state
        self._base, self._committed_at, self.sites = b"", -math.inf, 1
        self.last_error, self.times = "", Times()
        self.clipped: Mapping[str, float] = {}
        self._tools, self._length, self._new_nonce = tools, length, nonce
        self._roster, self._carrier, self._faults = tools.roster, tools.carrier, tools.faults
        self.promises = Promises(tools.journal, self.node, state.round)
        self._suspects, self._standstill = Suspects(self._roster.started_at), Standstill()
        self._involved = Involved()
        self._nonce = b""
        self._mine = Ready()
        self._attempt: Attempt | None = None
        self.statements = tools.statements
        self.leader = Leader(tools.roster, self.statements, self._leader_view, LearnedWait(initial=300.0, floor=5.0))
        self.claims = ProgressChecks(self._carrier, self._roster, self.statements, self._trusted)
        self.disputes = Disputes(self._carrier, self._roster, tools.proofs, self.statements, tools.convict, self.claims)
        self._carrier.serve(GATHER, self.leader.gather)
        self._carrier.serve(VOTE, self._take_vote)
        self._carrier.serve(ABORT, self._take_abort)
        self._carrier.serve_push(self.take_stream)

    def offer(self, number: int, shadow: bool) -> OuterState | None:
        """What a peer may fetch from us: the last committed state (by its number, or 0), or the next round's shadow."""
        found = self.promises.shadow if shadow else self.state
        wanted = number or (0 if shadow else self.state.round)
        return found if found and found.round == wanted else None

    def coming(self) -> int:
        """The number of this site's next round."""
        return self.state.round + 1

    def sources(self) -> list[str]:
        """Sites that have proved that they are ahead: this site needs their state before it continues."""
        return self.claims.sources()

    async def commit_alone(self, update: Update, advance: Advance) -> OuterState:
        """Commit a round with this site as its only member, which needs nobody's vote.

        A site whose disk has lost that round waits for it instead, as in `commit`: others may have followed it.
        """
        if self.promises.lost:
            return await self.commit(update, advance)
        state, tokens = self.state, {self.node: update.tokens}
        with span("outer step"):
            shadow = await asyncio.to_thread(lambda: advance(state, update.copied(), tokens))
            await check_finite(shadow)
        self._decide(shadow)
        await self._commit_state(shadow, [alone(shadow, state.digest, self.statements)])
        return shadow

    async def commit(self, update: Update, advance: Advance, sites: int = 1) -> OuterState:
        """Take part in the next round, of at least so many sites, until it is committed.

        Raises Behind if it was committed without us.
        """
        self.sites = sites
        await asyncio.to_thread(lambda: update.norm)  # every announcement needs it
        backoff, last = Backoff(), self.state.round
        self.times, self._involved = Times(), Involved()
        self.renew()
        while True:
            decided = self._roster.changed.until(lambda: bool(self.sources()))
            try:
                await first_of(self._try_once(update, advance), decided)
            finally:
                self._attempt = None
                self._tools.news.notify()
            if self.decided is not self.state:  # `first_of` has ended the attempt, and logged what went wrong in it
                raise PierError(f"the result of round {self.decided.round} cannot be kept", "The log says why.")
            if self.state.round > last or await self._confirmed():
                await self._faults.reach(self.state.round, "committed")
                self._roster.tell()
                return self.state
            await self._roster.changed.wait(backoff.seconds())

    @property
    def exchanging(self) -> bool:
        """Whether an attempt is under way."""
        return self._attempt is not None

    async def at_rest(self) -> None:
        """Return once no attempt is under way."""
        await self._tools.news.until(lambda: not self.exchanging)

    async def until_decided(self, round: int, work: asyncio.Task[bool]) -> None:
        """Return once the round is `decided` with this site, or after `work`."""

        def decided() -> bool:
            return work.done() or (self.decided.round >= round and self.decided is not self.state)

        work.add_done_callback(lambda _: self._tools.news.notify())
        await self._tools.news.until(decided)

    def _decide(self, result: OuterState) -> None:
        self.decided = result
        self._tools.news.notify()

    def renew(self) -> None:
        """Make our announcement out of date: proposals that rest on it are refused."""
        self._nonce = b""

    async def begin(self, state: OuterState, base: bytes) -> None:
        """Set the state that the coming round follows from; the state is on disk. Raises PierError.

        Args:
            base: what every member announces in place of its state's digest, when each has a state of its own.
        """
        await asyncio.to_thread(lambda: (state.digest, state.norm))
        await self.promises.settle(state.round)
        self.state = self.decided = state
        self._base = base

    @property
    def base(self) -> bytes:
        """Digest of the state that the coming round follows from."""
        return self._base or self.state.digest

    async def run(self) -> None:
        """Lead when it is this site's turn, and ask others to prove what they say; runs forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.leader.run())
            tasks.create_task(self.claims.run())
            tasks.create_task(self.disputes.run())
            if ask := self._tools.ask_witness:
                tasks.create_task(self._call_witness(ask))

    def trust(self) -> Trust:
        """What this site trusts: the state that it has."""
        return Trust(self._trusted(), self.statements)

    def _trusted(self) -> Trusted:
        return Trusted(self.state.round, self.base, self.state.members)

    def prove(self, round: int) -> list[Link]:
        """Links that prove our state to a site that trusts the state of that round, or a first part of them.

        Raises BadMessage: they cannot be read.
        """
        try:
            links = self._tools.proofs.after(round)
        except PierError as error:
            log.warning("this site cannot prove that its state was committed: %s", error)
            raise BadMessage(f"it cannot read its proofs: {error.problem}") from error
        return [link for link in links if link.round <= self.state.round]

    async def adopt(self, state: OuterState, proof: Sequence[Link]) -> None:
        """Continue from a state that was fetched from others. Raises PierError if it cannot be written to disk."""
        await self._commit_state(state, proof)

    async def give_votes(self, heir: str) -> frozenset[str]:
        """Give all our votes to the heir; return those it may have now. Raises PierError."""
        given = await self.promises.give(heir)
        self.renew()
        return given

    async def take_votes(self, round: int, votes: Collection[str], handovers: Iterable[Signed]) -> None:
        """Take over votes of members of that round. Raises PierError, and ValueError if it is not the last round."""
        await self.promises.take(round, votes, handovers)
        self.renew()

    def handovers(self) -> list[Signed]:
        """The handovers that prove which votes we hold and which we gave away."""
        return self.promises.handovers(self.base, self.statements)

    async def _call_witness(self, ask: Ask) -> None:
        """Get the vote of the run's witness whenever this site leads a group that lacks nothing else; runs forever."""
        witness, backoff = self.statements.witness, Backoff(first=1.0, last=10.0)
        while True:
            await self._roster.changed.until(lambda: self.leader.lacks_witness and witness not in self.promises.votes)
            here = self._trusted()
            try:
                request = WitnessRequest(
                    base=here.digest,
                    double_votes=self.statements.convicted.values(),
                    handovers=self.handovers(),
                )
                signed = await vote_of_witness(ask, request, here.round, self.prove)
                if self.statements.read(Handover, signed) != handover_of(witness, self.node, here):
                    raise BadMessage("the witness has given something else than its vote for the coming round")
                if self.promises.has_taken(signed.statement):
                    raise PeerLost("the witness", "this site has given that vote away")
                await self.take_votes(here.round, [witness], [signed])
            except (PeerLost, PierError, BadMessage, ValueError) as problem:  # ValueError: it was decided meanwhile
                self.leader.witness_says = problem.reason if isinstance(problem, PeerLost) else str(problem)
                self._roster.changed.notify()
                await asyncio.sleep(backoff.seconds())
                continue
            log.warning("round %d: half of its members are missing, and the witness gives its vote", here.round + 1)
            self.leader.witness_says, backoff = "", Backoff(first=1.0, last=10.0)
            self._roster.changed.notify()

    # --- asking the leader ---------------------------------------------------------------------

    async def _try_once(self, update: Update, advance: Advance) -> None:
        with self.times.spent_waiting():
            proposal = await self._ask(update)
            while proposal and proposal.verdict == Proposal.VERDICT_WAIT:
                proposal = await self._ask(update)  # at once: the group may close without us
        if proposal is None:
            return
        self._suspects.clear()
        self.renew()
        ready = self._mine
        try:
            await self.promises.promise(proposal.ballot, ready.votes)
        except Superseded:
            return
        attempt = self._attempt = Attempt(self._tools, self.state, self.promises, proposal, ready)
        try:
            with self.times.spent_on_attempt():
                shadow, link = await attempt.run(update, advance)
            self._suspects.forgive(attempt.group)
            self.clipped = attempt.clipped
            self._decide(shadow)
            await self._commit_state(shadow, [link], attempt.codes)
        except Suspicion as suspicion:
            self.last_error = str(suspicion)
            log.warning("round %d, attempt %d: given up: %s", proposal.round, proposal.ballot.number, suspicion)
            for node in self._involved.add(suspicion, {*attempt.group} - {self.node}):
                self._suspects.add(node, proposal.round if suspicion.mute else 0, since=attempt.began)
            self._tools.beside(attempt.give_up(suspicion))
        finally:
            attempt.close()

    async def _ask(self, update: Update) -> Proposal | None:
        """Announce ourselves to the leader; return its proposal if we can take part in it or shall wait."""
        if self.promises.lost:
            lost = (
                f"the disk of this site has lost round {self.promises.now.committed}, or what it voted for in it. "
                "It waits for a site that has it, or for you: see docs/protocol.md, amnesia"
            )
            if self.last_error != lost:
                log.error("%s", lost)
            self.last_error = lost
            return None
        self._nonce = self._nonce or self._new_nonce()
        ready = self._mine = self._ready(update)
        signed = self.statements.seal(ready)
        await self._faults.reach(ready.round, "ready")
        abreast = self._roster.abreast(self.state.round, self._committed_at)
        leader = leader_of({self.node, *abreast} - {*ready.suspects}, self._leaders())
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        try:
            proposal = await first_of(self._answer_of(leader, signed), self._until_outdated(ready))
        except PeerLost as lost:
            log.warning("round %d: the leader %s is lost: %s", ready.round, leader, lost.reason)
            self._suspects.add(leader, refused=clock() - asked_at < REFUSED, since=asked_at)
            return None
        if proposal is None or (proposal.verdict == Proposal.VERDICT_GO and self._acceptable(proposal, ready)):
            return proposal
        if leader != self.node:
            self._watch(leader, ready.round, proposal)
        if proposal.verdict == Proposal.VERDICT_GO:
            return None
        self.last_error = proposal.reason
        return proposal if proposal.verdict == Proposal.VERDICT_WAIT else None

    async def _answer_of(self, leader: str, signed: Signed) -> Proposal:
        if leader == self.node:
            return await self.leader.gather(leader, signed)
        return await self._carrier.call(leader, GATHER, signed, 2 * POLL)

    async def _until_outdated(self, ready: Ready) -> None:
        """Return once an announcement is out of date: our votes have changed, or a suspect in it is none now."""
        nonce, suspects = ready.nonce, {*ready.suspects}
        await self._roster.changed.until(lambda: self._nonce != nonce or not self._suspects.now().issuperset(suspects))

    def _watch(self, leader: str, round: int, proposal: Proposal) -> None:
        """Log what another leader waits for; suspect a leader that keeps everyone waiting."""
        if self._standstill.too_long(leader, self._all_wait(leader)):
            log.warning("round %d: the leader %s keeps all members waiting: asking another site", round, leader)
            self._suspects.add(leader)
        if proposal.verdict != Proposal.VERDICT_GO and proposal.reason not in ("", BUSY, self.last_error):
            log.log(waiting_level(self.sites), "round %d waits: %s", round, proposal.reason)

    def _all_wait(self, leader: str) -> bool:
        """Whether the leader has a quorum even without itself, and all others do nothing but wait for it."""
        others = {*self._roster.abreast(self.state.round, self._committed_at)} - {leader, self.node}
        base = self.statements.base(self.state.members)
        enough = has_quorum({*others, self.node, base.witness}, base) and len(others) + 2 >= self.sites
        return enough and all(map(self._roster.waits, others))

    def _ready(self, update: Update) -> Ready:
        ready = Ready(
            node=self.node,
            round=self.coming(),
            nonce=self._nonce,
            tokens=update.tokens,
            norm=update.norm,
            bandwidth=self._tools.bandwidth,
            suspects=sorted(self._suspects.now()),
            base=self.base,
            handovers=self.handovers(),
        )
        self.promises.announce(ready)
        if ready.HasField("voted") and (other := self._tools.votes.refutation(ready.voted_in, ready.voted)):
            ready.refutation.CopyFrom(other)
        return ready

    def _acceptable(self, proposal: Proposal, ready: Ready) -> bool:
        """Check a proposal without trusting anyone: may this attempt commit, and does it know what we know?"""
        try:
            read = [read_announcement(signed, self.statements) for signed in proposal.readies]
            announced = {it.ready.node: it for it in read}
            base = self.statements.base(self.state.members)
            problem = flaw(proposal, ready, announced, base, self._leaders(), self._length(ready.round))
        except BadMessage as bad:
            problem = str(bad)
        if ready.nonce != self._nonce:
            problem = "stale"
        if problem:
            log.warning("round %d: refused a proposal from %s: %s", ready.round, proposal.ballot.leader, problem)
        return not problem

    # --- what others say -----------------------------------------------------------------------

    async def _take_vote(self, sender: str, signed: Signed) -> Ack:
        vote = self.statements.read(Vote, signed)
        if vote.node != sender:
            raise BadMessage(f"a vote in the name of {vote.node}")
        if vote.round == self.coming():
            welcome = {*self.state.members, *(self._attempt.group if self._attempt else ())}
            if proof := self._tools.votes.count(vote, signed, welcome):
                self._tools.convict(proof)
            self._tools.news.notify()
        return Ack()

    async def _take_abort(self, sender: str, notice: AbortNotice) -> Ack:
        attempt = self._attempt
        if attempt and attempt.ballot == notice.ballot and sender in attempt.group:
            attempt.abort(sender, notice)
        return Ack()

    async def take_stream(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        """Receive a stream that a member pushes, maybe a moment before our own proposal arrives. Raises BadMessage."""
        first = await anext(chunks, None)
        if first is None:
            raise BadMessage("an empty stream")
        await heard_of("attempt", self._tools.news, lambda: self._is_stale(first) or self._reduction(first) is not None)
        if (reduction := self._reduction(first)) is None:
            raise BadMessage("that attempt is over")
        await reduction.take(sender, first, chunks)

    def _reduction(self, first: Chunk) -> Reduction | None:
        """The exchange under way that a stream belongs to."""
        attempt = self._attempt
        here = attempt is not None and (attempt.round, attempt.ballot) == (first.round, first.ballot)
        return attempt.reduction if attempt and here else None

    def _is_stale(self, first: Chunk) -> bool:
        return first.round <= self.state.round or order(first.ballot) < self.promises.now.promised

    # --- how a round ends ----------------------------------------------------------------------

    async def _confirmed(self) -> bool:
        """Commit our result if another site committed exactly that one. Raises Behind if it committed another."""
        peers, shadow = self.sources(), self.promises.shadow
        for node in peers:
            trust = self.claims.proof_of(node)
            if shadow and trust and (trust.state.round, trust.state.digest) == (shadow.round, shadow.digest):
                await self._commit_state(shadow, trust.links)
                return True
        if peers:
            raise Behind(peers)
        return False

    async def _commit_state(self, state: OuterState, proof: Sequence[Link], codes: Codes = NO_CODES) -> None:
        """Commit this state. We say so only once a power cut cannot undo it. Raises PierError."""
        await run_to_end(self._commit_state_now(state, proof, codes))

    async def _commit_state_now(self, state: OuterState, proof: Sequence[Link], codes: Codes) -> None:
        await asyncio.to_thread(self._tools.proofs.add, proof)
        await self._tools.keep(state)
        if codes and self._tools.means:
            await asyncio.to_thread(self._tools.means.keep, state.round, codes)
        await self.promises.settle(state.round)
        self.state = self.decided = state
        self._base, self._committed_at = b"", asyncio.get_running_loop().time()
        self._nonce = b""
        self._suspects.clear()
        self._tools.votes.clear()
        self.last_error = ""
        self._tools.news.notify()
        self._roster.changed.notify()

    def _leaders(self) -> Collection[str]:
        return self._tools.weighing(self.coming()).leaders(self.state)

    def _leader_view(self) -> LeaderView:
        bounds, length = self._tools.weighing(self.coming()), self._length(self.coming())
        seen = self.promises.now.promised[0]
        return LeaderView(self.state, self.base, self._committed_at, bounds, seen, length, self.sites)
