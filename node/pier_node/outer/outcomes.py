"""How meetings ended: answers for those who were left without, questions about those of which we were.

A record that differs between the two of a pair means that one of them was gone while the other went on: whoever is
behind, or was in doubt if neither is, takes the other's state (spec/noloco.md section 2.4, point 7).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pier.v1.peer_pb2 import SettleReply, SettleRequest
from pier_node.outer.deal import Deal, Outcome, PairTools
from pier_node.outer.records import Doubt, Records
from pier_node.outer.state import OuterState
from pier_node.wire.carrier import SETTLE, BadMessage, PeerLost

FOLLOW = 60.0
"""Seconds in which a site tries to take the state of a partner whose record differs from its own."""
LOOK_BACK = 5.0
"""Seconds that a question about an earlier round may take."""

log = logging.getLogger(__name__)


class Outcomes:
    """One site's knowledge of its past meetings.

    Args:
        here: this site's state, and the round of the newest one on its disk.
        deal: the meeting under way.
    """

    def __init__(
        self, tools: PairTools, here: Callable[[], tuple[OuterState, int]], deal: Callable[[], Deal | None]
    ) -> None:
        self._tools, self._here, self._deal = tools, here, deal
        self._leader, self._until = "", 0.0
        tools.carrier.serve(SETTLE, self._answer)

    @property
    def leader(self) -> str:
        """Whose state this site has to take; empty: nobody's, or not any more."""
        waits = asyncio.get_running_loop().time() < self._until and self._tools.roster.alive(self._leader)
        return self._leader if waits else ""

    def forget(self) -> None:
        """This site goes on from another's state: what became of its own meetings does not matter any more."""
        self._leader, self._until = "", 0.0
        self._tools.records = Records(self._tools.records.partners)

    async def resolve(self) -> None:
        """Ask deciders that are back how the meetings ended of which this site does not know."""
        state, _ = self._here()
        for doubt in list(self._tools.records.doubts.values()):
            if doubt.round == state.round and doubt.decider in state.members:
                await self._tools.keep(self._tools.records.took(doubt.round, doubt.decider))
            elif self._tools.roster.alive(doubt.decider):
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
            await self._tools.keep(self._tools.records.learnt(doubt.round))

    async def _answer(self, sender: str, request: SettleRequest) -> SettleReply:
        if sender < self._tools.node:
            raise BadMessage("of the two it is the one that decides")
        deal = self._deal()
        if deal and (deal.name, deal.partner) == (request.meeting, sender):
            outcome = await deal.answer(request)
        else:
            outcome = Outcome.OUTCOME_COMMITTED if self._took(request.round, sender) else Outcome.OUTCOME_REFUSED
        reply = SettleReply(outcome=outcome, at=self._here()[0].round)
        if request.left and outcome == Outcome.OUTCOME_COMMITTED and request.at > reply.at:
            self._follow(request.round, sender)
        return reply

    def _took(self, round: int, partner: str) -> bool:
        """Whether the step of a round was taken with a partner, and is on the disk."""
        state, saved = self._here()
        last = saved == state.round == round and partner in state.members
        return last or self._tools.records.partners.get(round) == partner

    def _follow(self, round: int, node: str) -> None:
        log.warning("round %d: its step was taken by one of us two only: going on from the state of %s", round, node)
        self._leader, self._until = node, asyncio.get_running_loop().time() + FOLLOW
