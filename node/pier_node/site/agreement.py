"""How the replicas of a run decide a round: all of them together (OfAll), or two at a time (InPairs).

In rounds of all, the sites end with the same bits. A site that hears of different bits at another one logs an error. In
pairs, each site has a state of its own until the optional merge at the end of the run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.gossip.catch_up import CatchUpInPairs
from pier_node.gossip.merge import Merge
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.outer.mean import Update
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.outer.state import OuterState
from pier_node.rounds.attempt import Advance
from pier_node.rounds.catch_up import CatchUp
from pier_node.rounds.means import Means
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Behind
from pier_node.wire.carrier import Carrier
from pier_proto.v1.peer_pb2 import Pulse

Fetch = Callable[[], Awaitable[bool]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peers:
    """The way to the other sites.

    Attributes:
        length: number of parameters of the model.
        means: of the rounds of all; None: a site that missed rounds fetches a state.
    """

    carrier: Carrier
    roster: Roster
    length: int
    faults: Faults = NO_FAULTS
    means: Means | None = None


class Agreement(ABC):
    """The other sites, as a replica's training sees them.

    Attributes:
        rounds: hold the state that the next round follows from.
    """

    def __init__(self, rounds: Rounds | PairRounds, peers: Peers) -> None:
        self.rounds, self.node, self.faults = rounds, peers.carrier.node, peers.faults
        self._carrier, self._roster = peers.carrier, peers.roster

    def others(self) -> list[Pulse]:
        """The last pulses of the other sites that take part and count: what a stranger claims slows nobody down."""
        taking_part = self._roster.participants().items()
        return [pulse for node, pulse in taking_part if node != self.node and self._counts(node)]

    def tell(self) -> None:
        """Tell the others now where this site is: otherwise the round may be closed before the next beat."""
        self._roster.tell()

    @abstractmethod
    def _counts(self, node: str) -> bool:
        """Whether the others have accepted a site."""

    @abstractmethod
    async def decide(self, plan: RoundPlan, update: Update, advance: Advance, fetch: Fetch) -> bool:
        """Bring an update to a round until it is decided. Returns whether this site took part to the end.

        Args:
            fetch: continues from the newest state of others, if there is one; returns whether there was.
        """

    @abstractmethod
    async def fetch(self) -> OuterState | None:
        """The newest state of the other sites, which `rounds` now hold; None: nobody is ahead."""

    def compare(self, state: OuterState) -> None:  # noqa: B027
        """Compare a state with what other sites say of theirs. Called once per round."""

    async def conclude(self, validate: Callable[[OuterState], Awaitable[None]]) -> bool:  # noqa: ARG002
        """Make something of all sites' last states together. Returns whether `rounds` hold another state now."""
        return False


class OfAll(Agreement):
    """Atomic rounds of all sites."""

    def __init__(self, rounds: Rounds, peers: Peers) -> None:
        super().__init__(rounds, peers)
        self._atomic = rounds
        self._catch_up = CatchUp(peers.carrier, peers.roster, peers.faults, peers.length, peers.means)
        self._lag = 0

    def _counts(self, node: str) -> bool:
        return node in self._atomic.state.members

    async def decide(self, plan: RoundPlan, update: Update, advance: Advance, fetch: Fetch) -> bool:
        """See Agreement."""
        while self._atomic.state.round < plan.round:
            try:
                if plan.kind is Kind.SOLO:
                    await self._atomic.commit_alone(update, advance)
                else:
                    await self._atomic.commit(update, advance, plan.sites)
                return True
            except Behind as behind:
                log.info("round %d was committed without this site: catching up from %s", plan.round, behind)
                await fetch()
        return False

    async def fetch(self) -> OuterState | None:
        """See Agreement."""
        fetched = await self._catch_up.newest(self._atomic.sources, self._atomic.trust, self._atomic.state)
        if fetched is None:
            return None
        await self._atomic.adopt(fetched.state, fetched.proof)
        self._compare_lag(fetched.state)
        return fetched.state

    def _compare_lag(self, state: OuterState) -> None:
        """Say so if a state was out of date when it was there, and the one before it no more so."""
        ahead = {*self._roster.ahead(state.round)} & {*state.members}
        pulses = self._roster.participants()
        lag = max((pulses[node].round for node in ahead if node in pulses), default=state.round) - state.round
        if 0 < self._lag <= lag:
            log.warning(
                "while the state of round %d was fetched, its members committed %d more: if this goes on, this "
                "site's link is too slow for the run's rounds (docs/operations.md, slow links)",
                *(state.round, lag),
            )
        self._lag = lag

    def compare(self, state: OuterState) -> None:
        """Log an error for each site that claims different bits after the same round.

        It stops nothing: a pulse is a claim that any site can make. Only signed votes prove a different history.
        """
        for node, pulse in self._roster.participants().items():
            if pulse.round == state.round and pulse.digest != state.digest:
                theirs, ours = pulse.digest.hex()[:12], state.digest.hex()[:12]
                log.error(
                    "round %d: %s says that its state differs from this site's: digest %s there, %s here",
                    *(state.round, node, theirs, ours),
                )


class InPairs(Agreement):
    """NoLoCo's rounds of two (arXiv 2506.10911), each site with a state of its own, and the merge of all at the end.

    Args:
        keep: awaited with each state before any other site relies on it. Raises PierError.
        merging: rounds of all sites for the merge; None: there is none.
    """

    def __init__(
        self,
        pairs: PairRounds,
        peers: Peers,
        progress: Progress,
        keep: Callable[[OuterState], Awaitable[None]],
        merging: Rounds | None,
    ) -> None:
        super().__init__(pairs, peers)
        self._pairs, self._progress, self._keep, self._merging = pairs, progress, keep, merging
        self._catch_up = CatchUpInPairs(peers.carrier, pairs.standing, peers.length, peers.faults)

    def _counts(self, node: str) -> bool:
        return self._pairs.standing.has(node)

    async def decide(self, plan: RoundPlan, update: Update, advance: Advance, fetch: Fetch) -> bool:
        """See Agreement. A pair takes its own step: see outer/noloco.py."""
        if plan.kind is Kind.SOLO:
            await self._pairs.commit_alone(update, advance)
            return True
        await self._pairs.resolve()
        if self._pairs.sources() and await fetch():
            return False
        await self._pairs.commit(plan.round, update, self._taken, plan.sites)
        return True

    async def fetch(self) -> OuterState | None:
        """See Agreement."""
        state = await self._catch_up.state(self._pairs.sources, self._pairs.state)
        if state is not None:
            await self._take(state)
        return state

    async def _take(self, state: OuterState) -> None:
        await self._keep(state)
        await self._pairs.adopt(state)

    async def _taken(self) -> None:
        """Store a step before any other site relies on it."""
        state, self._progress.spread = self._pairs.state, self._pairs.spread
        await self._keep(state)
        await self.faults.reach(state.round, "saved")

    async def conclude(self, validate: Callable[[OuterState], Awaitable[None]]) -> bool:
        """Merge the sites' models into their mean, if the run wants it."""
        if self._merging is None:
            return False
        await self._roster.announce()
        merge = Merge(self._carrier, self._pairs.standing, self._pairs.state, self._merging)
        state = await merge.run()
        if state is None:
            return False
        await self._take(state)
        await validate(state)
        self._progress.members_loss = merge.members_loss
        log.info(
            "%d models are merged: validation loss %.4f; %.4f in the mean before",
            *(len(state.members), self._progress.validation_loss, merge.members_loss),
        )
        return True
