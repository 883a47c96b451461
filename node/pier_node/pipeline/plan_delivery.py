"""How the sites of a round get their iteration plan: the planner sends it to all, and each takes one plan per round.

An error here costs only an attempt, because a step needs all sites of one plan to be ready for it.

A site that caused an attempt to fail, as far as the planner knows, is left out of the next plan, so that the iteration
can complete. If it fails again as soon as it is back in a plan, it is left out of twice as many rounds, and so on. This
happens for example with two sites whose link is cut while all other sites can reach both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from pier_node.base.tasks import Signal, first_of
from pier_node.pipeline.context import Position, Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import drop
from pier_node.pipeline.planner import Lacking, Planner
from pier_node.pipeline.stage_state import StageState
from pier_node.pipeline.vote_state import Turn, VoteState
from pier_node.rounds.roster import LATE
from pier_node.wire.carrier import ROUTE, BadMessage, PeerLost
from pier_proto.v1.peer_pb2 import Ack, IterationPlan, Phase, Pulse

MOST = 8
"""Maximum number of rounds for which a site is left out."""


class Suspects:
    """The sites to leave out of the plan of a round."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[int, int]] = {}

    def add(self, node: str, round: int) -> None:
        """Record that the attempt before this round failed because of a site."""
        times = min(2 * self._out[node][0], MOST) if node in self._out else 1
        self._out[node] = times, round + times

    def of(self, round: int) -> set[str]:
        """The sites to leave out."""
        return {node for node, (_, until) in self._out.items() if round < until}

    def clear(self, nodes: Iterable[str]) -> None:
        """Clear sites that took part in an attempt that counted, or without which no plan is possible."""
        for node in [*nodes]:
            self._out.pop(node, None)


TELL_TIMEOUT = 60.0
"""Seconds that a site has to create its stage and accept a plan."""
PATIENCE = 120.0
"""Seconds to wait for a plan. The first search is compiled, which may take that long on a slow machine."""
CATCHING_UP = 100.0
"""Seconds that the planner waits for a site that fetches its stage.

If the site fails to get it, the planner waits for it again this many seconds later.
"""
LOOK = 1.0
BUSY = (Phase.PHASE_WAITING, Phase.PHASE_EXCHANGING)

log = logging.getLogger(__name__)


class Routing:
    """This site's side of routing.

    Args:
        news: notified when a plan has arrived.

    Attributes:
        suspect: the site that made the last attempt fail; "": none.
        lacking: the sites that the run waits for, in words; "": none.
    """

    def __init__(
        self, tools: Tools, planner: Planner, stage_state: StageState, position: Position, news: Signal
    ) -> None:
        self._carrier, self._roster, self._planner = tools.carrier, tools.roster, planner
        self._stage_state, self._position, self._news = stage_state, position, news
        self._stages = position.config.pipeline.stages
        self._taken: dict[int, Plan] = {}
        self._open, self._closed, self._late_after = 0, 0, 0.0
        self._behind: dict[str, float] = {}
        self.suspect, self.lacking = "", ""
        self._suspects, self._tried = Suspects(), (0, list[str]())
        self._carrier.serve(ROUTE, self._take)

    async def plan(self, least: int, needless: Callable[[], bool]) -> Plan | None:
        """The plan of the next round; None: there is none and the round will be empty.

        Args:
            least: number of sites that must be present before the first plan.
            needless: returns whether others are at a later round, or this site should pause.
        """
        loop, number = asyncio.get_running_loop(), self._position.coming
        self._open, self._late_after = number, loop.time() + LATE
        self._news.notify()
        deadline = loop.time() + PATIENCE
        while number not in self._taken and loop.time() < deadline and not needless():
            mine = min(self._here(late=True)) == self._carrier.node
            complete = len(self._here()) >= max(least, len(self._here(late=True)))
            if self._others_wait(number):
                break  # they are done with it, whoever planned it
            if mine and complete and not self._awaits() and not self._others_work(number) and await self._offer(number):
                break
            await self._heard()
            if least > 1 or self.lacking or self._others_work(number):
                deadline = loop.time() + PATIENCE  # some sites have yet to arrive, or others work without this one
        found = self._taken.pop(number, None)
        self._taken.clear()
        self._closed = number
        return found

    async def over(self, plan: Plan, behind: Callable[[], bool]) -> None:
        """Wait, at a site that takes no part, until a participant waits for the round or no site works on it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while not behind() and not self._others_wait(plan.round) and loop.time() < deadline:
            await self._roster.changed.wait(LOOK)
            if self._others_work(plan.round):
                deadline = loop.time() + PATIENCE

    @property
    def _meets(self) -> bool:
        """Whether the next round is an outer round of the replicas."""
        return self._position.turn is Turn.MEET

    def _here(self, late: bool = False) -> dict[str, Pulse]:
        """Live sites that have the round before the next one; `late`: also those that will have it in a moment."""
        at, waits = self._position.coming - 1, late and asyncio.get_running_loop().time() < self._late_after
        found = self._possible(self._roster.participants()).items()
        return {
            node: it for node, it in found if it.round == at or node == self._carrier.node or (waits and it.round < at)
        }

    def _possible(self, pulses: Mapping[str, Pulse]) -> dict[str, Pulse]:
        """The pulses without sites that claim a stage that this run does not have."""
        return {node: it for node, it in pulses.items() if it.place.stage < self._stages}

    def _awaits(self) -> bool:
        """Whether a site lacks the last step of its stage: a further step without it would leave it behind again.

        A site that waits for the next round without its stage could not get it. The planner waits for it again later.
        """
        now, at = asyncio.get_running_loop().time(), self._position.coming - 1
        versions = self._position.voted.versions
        pulses = {node: it for node, it in self._possible(self._roster.pulses()).items() if it.HasField("place")}
        for node, it in pulses.items():
            if it.place.version == versions[it.place.stage]:
                self._behind.pop(node, None)
            elif it.training_for == at + 1 and it.phase != Phase.PHASE_CATCHING_UP:
                self._behind[node] = now + CATCHING_UP
            elif it.round == at or it.phase == Phase.PHASE_CATCHING_UP:
                self._behind.setdefault(node, now)
        awaited = {*pulses} - self._suspects.of(at + 1)
        return any(since <= now < since + CATCHING_UP for node, since in self._behind.items() if node in awaited)

    def _others_wait(self, number: int) -> bool:
        pulses = {node: it for node, it in self._roster.participants().items() if node != self._carrier.node}
        return any(it.phase in BUSY and it.training_for == number for it in pulses.values())

    def _others_work(self, number: int) -> bool:
        """Whether any site works on an attempt of this round. A site that enters the round before them would end it."""
        pulses = {node: it for node, it in self._roster.participants().items() if node != self._carrier.node}
        return any(it.place.working and it.training_for == number for it in pulses.values())

    async def _heard(self) -> None:
        """Return on any news, or after LOOK seconds."""
        await first_of(self._news.wait(LOOK), self._roster.changed.wait(LOOK))

    # --- at the planner --------------------------------------------------------------------------

    async def _offer(self, number: int) -> bool:
        """Plan and send the plan to all sites. Returns whether there was a plan to send."""
        pulses, voted = self._here(), self._position.voted
        self._learn(number, voted.steps)
        for node in self._suspects.of(number):
            pulses.pop(node, None)
        try:
            message = await self._planner.plan(number, voted, pulses, self._roster.round_trips(), self._meets)
        except Lacking as lacking:
            if str(lacking) != self.lacking:
                log.warning("round %d waits: %s", number, lacking)
            self.lacking = str(lacking)
            self._suspects.clear(self._suspects.of(number))
            return False
        self.lacking, self._tried = "", (voted.steps, [*message.nodes])
        if self._position.coming != number:
            return True
        told = [*message.nodes, *message.candidates]
        results = await asyncio.gather(*(self._tell(node, message) for node in told))
        if lost := next((it for it in results if it), None):
            log.warning("round %d: the plan is dropped: %s", number, lost)
            self.suspect = lost.node
            self._taken.pop(number, None)
            await self._recall(message, lost)
        return True

    def _learn(self, number: int, steps: int) -> None:
        """Update the suspects from the outcome of the last plan."""
        before, nodes = self._tried
        if steps > before:
            self._suspects.clear(nodes)
        if self.suspect not in ("", self._carrier.node):
            self._suspects.add(self.suspect, number)
        self.suspect = ""

    async def _tell(self, node: str, message: IterationPlan) -> PeerLost | None:
        try:
            if node == self._carrier.node:
                await self._take(node, message)
            else:
                await self._carrier.call(node, ROUTE, message, TELL_TIMEOUT)
        except BadMessage as bad:
            return PeerLost(node, str(bad))
        except PeerLost as lost:
            return lost if node in message.nodes else None
        return None

    async def _recall(self, message: IterationPlan, lost: PeerLost) -> None:
        name = Plan.read(message, self._stages, self._planner.seed).name
        others = [node for node in message.nodes if node not in (self._carrier.node, lost.node)]
        await drop(self._carrier, others, name, lost.node, lost.reason, TELL_TIMEOUT)

    # --- at every site ---------------------------------------------------------------------------

    async def _take(self, _sender: str, message: IterationPlan) -> Ack:
        plan = Plan.read(message, self._stages, self._planner.seed)
        with suppress(TimeoutError):
            async with asyncio.timeout(LATE):  # a plan may arrive just before this site has finished the last round
                await self._news.until(lambda: self._open >= plan.round)
        number, voted = self._open, self._position.voted
        if plan.round != number or message.step != voted.steps:
            raise BadMessage(f"a plan of round {plan.round} after {message.step} steps: this site is at {number}")
        if plan.message.meet != self._meets:
            raise BadMessage(f"an iteration where replicas meet, or the reverse, in round {plan.round}")
        if number in self._taken or number <= self._closed:
            raise BadMessage("this site has a plan for that round already, or has done without one")
        given = dict(zip(message.candidates, message.newcomers)) | plan.stages
        stage = given.get(self._carrier.node)
        if stage is None:
            raise BadMessage("this site has no place in that plan")
        await self._hold(stage, voted, taking_part=self._carrier.node in plan.stages)
        if self._taken.setdefault(number, plan) is not plan:
            raise BadMessage("this site has just taken another plan for that round")
        self._news.notify()
        return Ack()

    async def _hold(self, stage: int, voted: VoteState, taking_part: bool) -> None:
        """Hold the stage that the plan assigns. Raises BadMessage: this site holds another stage or version."""
        stage_state = self._stage_state
        if stage_state.stage is None:
            await asyncio.to_thread(stage_state.hold, stage)
        if stage_state.stage != stage or (taking_part and stage_state.version != voted.versions[stage]):
            having = f"in version {stage_state.version}" if stage_state.state else "and is still to fetch it"
            raise BadMessage(f"this site holds stage {stage_state.stage} {having}")
