"""The training loop of a run in pairs: training.py with another update, another decision and a final merge."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from pier_node.gossip.merge import Merge
from pier_node.gossip.pairs import Pairs
from pier_node.outer.schedule import Kind, RoundPlan, total_rounds
from pier_node.outer.state import OuterState
from pier_node.outer.update import Update
from pier_node.rounds.fetch import Fetched
from pier_node.rounds.member import Rounds
from pier_node.rounds.suspects import Behind
from pier_node.site.training import Training
from pier_proto.v1.peer_pb2 import Phase

log = logging.getLogger(__name__)


class PairTraining(Training):
    """The training loop of a site that meets one other site per round.

    It takes Training's arguments, with Pairs as rounds.

    Args:
        keep: awaited with each state before any other site relies on it.
        merge: rounds for the final merge; None: there is none.
    """

    def __init__(
        self, *parts: Any, keep: Callable[[OuterState], Awaitable[None]], merge: Rounds | None, **more: Any
    ) -> None:
        super().__init__(*parts, **more)
        self._keep, self.merge = keep, merge

    @property
    def _pairs(self) -> Pairs:
        return cast(Pairs, self._rounds)

    async def run(self) -> None:
        """Train to the end of the run. Raises PierError when training cannot continue."""
        await super().run()
        if self.merge and self._pairs.state.round == total_rounds(self._config):
            self.progress.phase = Phase.PHASE_WAITING
            await self._merge(self.merge)
            self.progress.phase = Phase.PHASE_DONE

    def _update(self, plan: RoundPlan, tokens: int) -> Update:
        sent = super()._update(plan, tokens)
        if plan.kind is not Kind.PAIR:
            return sent
        theta = self._beginning(self._rounds.state).array  # φ − Δ, whatever happened to Δ: a pair exchanges weights
        vector, error = self._pending.offer(plan.span(len(theta)), theta)
        return Update(vector, sent.tokens, error)

    async def _decide(self, plan: RoundPlan, update: Update) -> bool:
        pairs = self._pairs
        await pairs.resolve()
        if pairs.sources() and await self._fetch():
            return False
        await pairs.commit(plan.round, update, self._taken)
        return True

    def _trust(self) -> None:
        return None

    async def _adopt(self, fetched: Fetched) -> None:
        await self._go_on_from(fetched.state)

    async def _go_on_from(self, state: OuterState) -> None:
        await self._keep(state)
        await self._pairs.adopt(state)

    def _compare(self, state: OuterState) -> None:
        """Do nothing: each site has its own state."""

    async def _taken(self) -> None:
        """Store a step before any other site relies on it."""
        state, self.progress.spread = self._pairs.state, self._pairs.spread
        await self._keep(state)
        await self._faults.reach(state.round, "saved")

    async def _merge(self, rounds: Rounds) -> None:
        await self._roster.announce()
        merge = Merge(self._carrier, self._roster, self._pairs.state, rounds)
        try:
            state = await merge.run()
        except Behind as behind:
            state = await self._merged_by(behind)
        if state is None:
            return
        await self._go_on_from(state)
        await self.validate(state)
        self.progress.members_loss = merge.members_loss
        log.info(
            "%d models are merged: validation loss %.4f; %.4f in the mean before",
            *(len(state.members), self.progress.validation_loss, merge.members_loss),
        )
        await self._on_commit(self.snapshot())
        await self._faults.reach(state.round, "saved")

    async def _merged_by(self, behind: Behind) -> OuterState | None:
        log.info("the others have merged their models: fetching theirs: %s", behind)
        last = self._pairs.state.round
        fetched = await self._catch_up.newest(lambda: self._roster.ahead(last), moments=False)
        if fetched is None:
            log.warning("this site's model stays as it is, and is not in theirs: nobody who has it is there any more")
        return fetched.state if fetched else None
