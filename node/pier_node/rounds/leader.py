"""The leader's side of a round: collect announcements until its deadline (deadline.py), and propose the group.

Every node can lead; of the live participants, the one with the lowest id does. The leader shows members the
announcements, and each member repeats all of its decisions (quorum.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from pier_node.base.patience import LearnedWait
from pier_node.config.run import SITES
from pier_node.outer.mean import Weighing, split
from pier_node.outer.state import OuterState
from pier_node.rounds import quorum
from pier_node.rounds.deadline import RoundDeadline
from pier_node.rounds.double_votes import refutes
from pier_node.rounds.exchange_plan import fitting
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Proposal, Ready, Share, Signed, Vote

POLL = 10.0
"""Seconds for which a question is held open before the member asks again."""
UNREMARKABLE = 5.0
"""Seconds for which something may be missing before the log says so."""
NAMED = 50
"""Most sites that a reason to wait names."""
BUSY = "most of the last round's members are still training"
"""A reason to wait that is not logged; it also covers a leader that has not committed the previous round."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaderView:
    """Where a node stands: what the leader needs to know about the coming round."""

    state: OuterState
    """The state that the coming round follows from."""
    digest: bytes
    at: float
    """When the node committed that state, in seconds of the loop's clock."""
    bounds: Weighing
    """Those of the coming round."""
    seen: int
    """Number of the highest ballot of the coming round in which this node has taken part."""
    length: int
    """Number of elements that the coming round syncs."""
    sites: int
    """Least number of members that the coming round must have."""


@dataclass
class Arrival:
    """A member that is ready and waits for its answer."""

    announced: quorum.Announcement
    signed: Signed
    at: float
    answer: asyncio.Future[Proposal]

    @property
    def ready(self) -> Ready:
        """The announcement itself."""
        return self.announced.ready


class Leader:
    """Collects announcements for the coming round and closes its group.

    Args:
        patience: learns how long after the first member the others arrive.

    Attributes:
        lacks_witness: whether the group that should go on lacks nothing but the vote of the run's witness.
        witness_says: why the witness did not give that when it was last asked in this round.
    """

    def __init__(
        self, roster: Roster, statements: Statements, view: Callable[[], LeaderView], patience: LearnedWait
    ) -> None:
        self._node, self._roster = roster.node, roster
        self._statements = statements
        self._view = view
        self._deadline = RoundDeadline(roster, patience)
        self._arrivals: dict[str, Arrival] = {}
        self._round = 0
        self._last = Proposal()
        self._answered: dict[str, bytes] = {}
        self._told = ""
        self._enough_at = math.inf
        self.lacks_witness, self.witness_says = False, ""
        self._failures: Counter[str] = Counter()

    async def gather(self, sender: str, signed: Signed) -> Proposal:
        """Answer a member that is ready, once there is an answer."""
        announced = read_announcement(signed, self._statements)
        ready = announced.ready
        if ready.node != sender:
            raise BadMessage(f"an announcement in the name of {ready.node}")
        self._deadline.heard(sender)
        await self._until_committed(ready.round - 1)
        view = self._view()
        if refusal := self._refuse(ready, self._abreast()):
            return refusal
        if ready.base != view.digest:
            raise BadMessage(f"after round {view.state.round} it holds different bits than this site")
        if ready.seen.number > view.seen + quorum.LEAP // 2:
            raise BadMessage(f"ballot {ready.seen.number} is far above all proposed ballots")
        if self._last.round == ready.round and self._answered.get(ready.node) == ready.nonce:
            return self._last
        arrival = self._admit(announced, signed)
        try:
            async with asyncio.timeout(POLL):
                return await arrival.answer
        except TimeoutError:
            return Proposal(verdict=Proposal.VERDICT_WAIT, round=ready.round, reason=self._told)
        finally:
            if self._arrivals.get(sender) is arrival:
                del self._arrivals[sender]

    async def _until_committed(self, round: int) -> None:
        """Wait a while if this is the coming round: a member may commit it a moment before its leader."""
        if round == self._view().state.round + 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL / 2):  # the answer takes POLL more, and a member waits for twice that
                    await self._roster.changed.until(lambda: round <= self._view().state.round)

    async def run(self) -> None:
        """Close each group when it is complete or its deadline has passed; runs forever."""
        while True:
            await self._roster.changed.wait(self._close_if_due())

    def _abreast(self) -> list[str]:
        view = self._view()
        return self._roster.abreast(view.state.round, view.at)

    def _refuse(self, ready: Ready, abreast: Sequence[str]) -> Proposal | None:
        view = self._view()
        committed = view.state.round
        if ready.round <= committed:
            return Proposal(verdict=Proposal.VERDICT_BEHIND, round=committed, other=self._node)
        if ready.round > committed + 1:
            return _not_leader(ready, "", BUSY)
        better = quorum.leader_of({self._node} | {*abreast} - {*ready.suspects}, view.bounds.leaders(view.state))
        return None if better == self._node else _not_leader(ready, better, "another site leads this round")

    def _admit(self, announced: quorum.Announcement, signed: Signed) -> Arrival:
        ready = announced.ready
        if ready.round != self._round:
            self._round, self._arrivals, self._enough_at = ready.round, {}, math.inf
            self.lacks_witness, self.witness_says = False, ""
            self._deadline.begin()
        at = self._deadline.arrived(ready, self._view().state.members)
        answer = asyncio.get_running_loop().create_future()
        arrival = self._arrivals[ready.node] = Arrival(announced, signed, at, answer)
        self._roster.changed.notify()
        return arrival

    def _send_on(self) -> None:
        """Answer members that have come to the wrong leader, by what is known now."""
        abreast = self._abreast()
        for node, arrival in [*self._arrivals.items()]:
            if refusal := self._refuse(arrival.ready, abreast):
                del self._arrivals[node]
                if not arrival.answer.done():
                    arrival.answer.set_result(refusal)

    def _close_if_due(self) -> float | None:
        """Close the group if it is time. Return seconds until the next look, or None to wait for a change."""
        if not self._arrivals:
            return None
        view, now = self._view(), asyncio.get_running_loop().time()
        self._send_on()
        if self._round != view.state.round + 1 or not self._arrivals:
            return None
        readies = {node: arrival.ready for node, arrival in self._arrivals.items()}
        waited = now - min(arrival.at for arrival in self._arrivals.values())
        witness = self._statements.witness
        group, self.lacks_witness = self._choose(readies, view, witness), False
        if problem := self._lacking(group, view, witness):
            # With a result that is missing, the witness is not asked: its vote would not be enough.
            return self._tell(problem, waited)
        self._enough_at = min(self._enough_at, now)
        if (wait := self._wait_or_give_up(readies, group, now - self._enough_at)) > 0:
            return wait
        if self._lacking(group, view):
            self.lacks_witness = True
            if not self.witness_says:
                self._roster.changed.notify()
                return None
            group = self._choose(readies, view)
        if problem := self._lacking(group, view):
            return self._tell(problem, waited)
        self._propose(group, readies, view)
        return None

    def _choose(self, readies: dict[str, Ready], view: LeaderView, more: str = "") -> frozenset[str]:
        """The best group that could start if it also had the vote `more`; with "", with its own votes alone."""
        voters = self._voters(readies)
        group = quorum.choose_group(readies, voters, lambda group: not self._lacking(group, view, more))
        strangers = group - voters
        if self._last.round != self._round:  # after a failed attempt, none: a stranger may make each one fail
            strangers = self._held_back(strangers)
        return group if self._lacking(group - strangers, view, more) else group - strangers

    def _held_back(self, strangers: frozenset[str]) -> frozenset[str]:
        """Strangers that this round's first attempt does without, because attempts with them have failed.

        Of such strangers half take part, or a quarter after two failures, and so on down to a single one: those with
        the fewest failures. So each honest one gets in, whatever the others do.
        """
        doubted = sorted((node for node in strangers if self._failures[node]), key=lambda it: (self._failures[it], it))
        return frozenset(doubted[max(1, len(doubted) >> self._failures[doubted[0]]) :] if doubted else ())

    def _learn_from_failure(self, group: frozenset[str], view: LeaderView) -> None:
        """Blame the strangers of the last attempt, unless one of its members is gone: that may explain the failure."""
        members = {*view.state.members}
        last = {share.node for share in self._last.shares} if self._last.round == self._round else set[str]()
        if last & members <= group:
            self._failures.update(last)
        kept = Counter({node: count for node, count in self._failures.items() if node not in members})
        self._failures = Counter(dict(kept.most_common(SITES)))

    def _wait_or_give_up(self, readies: dict[str, Ready], group: frozenset[str], waited: float) -> float:
        wait = self._deadline.wait_or_give_up(readies, waited, self._view().state.members, self._abreast())
        return max(wait, self._deadline.seconds_for_introductions(group, waited))

    def _voters(self, nodes: Collection[str]) -> frozenset[str]:
        base = self._statements.base(self._view().state.members)
        return quorum.voters_of({node: self._arrivals[node].announced for node in nodes}, base)

    def _lacking(self, group: frozenset[str], view: LeaderView, more: str = "") -> str:
        """Why this group cannot start with this vote besides its own, in words; empty if it can."""
        votes = quorum.votes_of({node: self._arrivals[node].announced for node in group})
        if not quorum.has_quorum({*votes, more}, self._statements.base(view.state.members)):
            absent = _some({*view.state.members} - votes - {*self._roster.participants()})
            witness = f"; the witness does not give its vote: {self.witness_says}" if self.witness_says else ""
            return f"no majority of the last round's members is here; absent: {absent}{witness}" if absent else BUSY
        readies = [self._arrivals[node].ready for node in group]
        decision = quorum.choose_value(readies, self._voters(group), self._statements.convicted)
        if isinstance(decision, quorum.Blocked):
            return f"a result may have been committed by sites that are not here: {_some(decision.missing)}"
        if isinstance(decision, quorum.Fresh) and len(group) < view.sites:
            return f"waiting for {view.sites - len(group)} more of the run's {view.sites} sites"
        return ""

    def _propose(self, group: frozenset[str], readies: dict[str, Ready], view: LeaderView) -> None:
        self._learn_from_failure(group, view)
        members = sorted(group)
        chosen = [readies[node] for node in members]
        shards = zip(chosen, _shards(chosen, view), strict=True)
        proposal = Proposal(
            verdict=Proposal.VERDICT_GO,
            round=self._round,
            ballot=quorum.next_ballot(chosen, self._node),
            shares=[Share(node=it.node, tokens=it.tokens, norm=it.norm, offset=at, length=n) for it, (at, n) in shards],
            readies=[self._arrivals[node].signed for node in members],
        )
        decision = quorum.choose_value(chosen, self._voters(group), self._statements.convicted)
        if isinstance(decision, quorum.Adopt):
            proposal.adopt.CopyFrom(decision.value)
            proposal.holders.extend(decision.holders)
        self.lacks_witness = False
        self._last, self._answered = proposal, {node: readies[node].nonce for node in group}
        self._answer(group, proposal)

    def _answer(self, group: frozenset[str], proposal: Proposal) -> None:
        first = min(arrival.at for arrival in self._arrivals.values())
        excluded = Proposal(
            verdict=Proposal.VERDICT_EXCLUDED, round=self._round, reason="other members could not reach or trust it"
        )
        # After a failed attempt all come back together, which does not say how far apart they end their inner steps.
        delays = [it.at - first for it in self._arrivals.values() if not it.ready.seen.number]
        self._deadline.closed(group, delays)
        for node, arrival in self._arrivals.items():
            if not arrival.answer.done():
                arrival.answer.set_result(proposal if node in group else excluded)
        self._arrivals, self._enough_at = {}, math.inf

    def _tell(self, problem: str, waited: float) -> float | None:
        """Report what is missing, once it has been missing for a while. Return seconds until then."""
        if waited < UNREMARKABLE:
            return UNREMARKABLE - waited
        if problem not in (BUSY, self._told):
            log.log(waiting_level(self._view().sites), "round %d waits: %s", self._round, problem)
        self._told = problem
        return None


def _some(nodes: Collection[str]) -> str:
    """These nodes in words: a message has no room for the names of many (wire/bounds.py)."""
    named, more = sorted(nodes)[:NAMED], len(nodes) - NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def waiting_level(sites: int) -> int:
    """Log level of the line that says what a round waits for: in a new run, sites normally arrive one by one."""
    return logging.INFO if sites > 1 else logging.WARNING


def _shards(readies: Sequence[Ready], view: LeaderView) -> list[tuple[int, int]]:
    """The shards, by member. The announced uplink of a stranger counts as unknown."""
    rates = {ready.node: ready.bandwidth if ready.node in view.state.members else 0.0 for ready in readies}
    owned = _owned(view.length, {node: rates[node] for node in view.bounds.owners(view.state, rates)})
    lengths = [owned.get(node, 0) for node in rates]
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _owned(length: int, rates: Mapping[str, float]) -> dict[str, int]:
    """Length of each owner's shard. The slowest of many own none, so that the others fill a grid."""
    parts = split(length, [*rates.values()])
    owned = {node: size for node, (_, size) in zip(rates, parts, strict=True) if size}
    if (most := fitting(len(owned))) == len(owned):
        return owned
    chosen = {*sorted(owned, key=lambda node: owned[node], reverse=True)[:most]}
    return _owned(length, {node: rate for node, rate in rates.items() if node in chosen})


def read_announcement(signed: Signed, statements: Statements) -> quorum.Announcement:
    """A member's announcement with the handovers that it shows.

    Raises:
        BadMessage: a part of it is not signed, or its refutation refutes nothing.
    """
    ready = statements.read(Ready, signed)
    if ready.HasField("refutation") and not refutes(statements.read(Vote, ready.refutation), ready):
        raise BadMessage(f"the announcement of {ready.node} has a vote that does not refute its own")
    return quorum.Announcement(ready, [statements.read(Handover, it) for it in ready.handovers])


def _not_leader(ready: Ready, other: str, reason: str) -> Proposal:
    return Proposal(verdict=Proposal.VERDICT_NOT_LEADER, round=ready.round, other=other, reason=reason)
