"""How the sites of a round come by its plan: the planner tells all of them, and they take one each round.

Whatever goes wrong here only costs an attempt: a step needs all sites of one plan to be ready for it.

Sites that attempts failed by, as far as the planner has heard.

Such a site is left out of the next plan, so that the iteration is done. If it happens again as soon as it is planned
in, as with two sites whose link is cut while all others see both, it is left out of twice as many, and so on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from pier_node.base.tasks import Signal
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import drop
from pier_node.pipeline.planner import Lacking, Planner
from pier_node.pipeline.stage_state import StageState
from pier_node.pipeline.vote_state import Standing
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import ROUTE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Ack, IterationPlan, Phase, Pulse

MOST = 8
"""Rounds that a site is left out at most."""


class Suspects:
    """Whom to leave out of the plan of a round."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[int, int]] = {}

    def add(self, node: str, round: int) -> None:
        """The attempt before this round's failed by a site."""
        times = min(2 * self._out[node][0], MOST) if node in self._out else 1
        self._out[node] = times, round + times

    def of(self, round: int) -> set[str]:
        """Those to leave out."""
        return {node for node, (_, until) in self._out.items() if round < until}

    def clear(self, nodes: Iterable[str]) -> None:
        """These took part in an attempt that counted, or there is no plan without them."""
        for node in [*nodes]:
            self._out.pop(node, None)


TELL_TIMEOUT = 60.0
"""Seconds that a site has to make its stage and take a plan."""
PATIENCE = 120.0
"""Seconds to wait for a plan: the first one is compiled, and may take as many as that on a slow machine."""
LATE = 10.0
"""Seconds after a round within which whoever is well has it too."""
CATCHING_UP = 100.0
"""Seconds that the planner waits for a site which fetches its stage, and after which it does so again if it failed."""
LOOK = 1.0
BUSY = (Phase.PHASE_WAITING, Phase.PHASE_EXCHANGING)

log = logging.getLogger(__name__)


class Routing:
    """This site's side of it.

    Args:
        coming: the number of the round that a plan is awaited for.
        standing: where the run is.
        meets: whether the coming round is an outer one of the replicas.
        news: notified when a plan is here.

    Attributes:
        suspect: by whom the last attempt failed; "": by nobody.
        lacking: whom the run waits for, in words; "" if for nobody.
    """

    def __init__(
        self,
        carrier: Carrier,
        roster: Roster,
        planner: Planner,
        stage_state: StageState,
        stages: int,
        coming: Callable[[], int],
        standing: Callable[[], Standing],
        meets: Callable[[], bool],
        news: Signal,
    ) -> None:
        self._carrier, self._roster, self._planner, self._stage_state = carrier, roster, planner, stage_state
        self._stages, self._coming, self._standing, self._news = stages, coming, standing, news
        self._meets = meets
        self._taken: dict[int, Plan] = {}
        self._open, self._closed, self._late_after = 0, 0, 0.0
        self._behind: dict[str, float] = {}
        self.suspect, self.lacking = "", ""
        self._suspects, self._tried = Suspects(), (0, list[str]())
        carrier.serve(ROUTE, self._take)

    async def plan(self, least: int, needless: Callable[[], bool]) -> Plan | None:
        """The plan of the coming round; None: there is none, the round is to be empty.

        Args:
            least: sites that must be there before the first plan.
            needless: whether others are at a later round, or this site is to pause.
        """
        loop, number = asyncio.get_running_loop(), self._coming()
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
                deadline = loop.time() + PATIENCE  # for sites that are yet to come, or are at it without this one
        found = self._taken.pop(number, None)
        self._taken.clear()
        self._closed = number
        return found

    async def over(self, plan: Plan, behind: Callable[[], bool]) -> None:
        """For a site that takes no part: return once one that does waits for the round, or none works on it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while not behind() and not self._others_wait(plan.round) and loop.time() < deadline:
            await self._roster.changed.wait(LOOK)
            if self._others_work(plan.round):
                deadline = loop.time() + PATIENCE

    def _here(self, late: bool = False) -> dict[str, Pulse]:
        """Live sites that are at the round before the coming one; `late`: and those who will be, in a moment."""
        at, waits = self._coming() - 1, late and asyncio.get_running_loop().time() < self._late_after
        found = self._possible(self._roster.participants()).items()
        return {
            node: it for node, it in found if it.round == at or node == self._carrier.node or (waits and it.round < at)
        }

    def _possible(self, pulses: Mapping[str, Pulse]) -> dict[str, Pulse]:
        """Without sites that say they hold a stage which this run has not."""
        return {node: it for node, it in pulses.items() if it.place.stage < self._stages}

    def _awaits(self) -> bool:
        """Whether a site lacks the last step of its stage: another one without it would leave it behind again.

        One that waits for the coming round all the same could not have it: it is awaited again a while later.
        """
        now, at, versions = asyncio.get_running_loop().time(), self._coming() - 1, self._standing().versions
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
        """Whether any site is at an attempt at this round; who comes to the round before them would end it."""
        pulses = {node: it for node, it in self._roster.participants().items() if node != self._carrier.node}
        return any(it.place.working and it.training_for == number for it in pulses.values())

    async def _heard(self) -> None:
        """Return at any news, or after a moment."""
        waits = [asyncio.create_task(it.wait(LOOK)) for it in (self._news, self._roster.changed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # --- the planner -----------------------------------------------------------------------------

    async def _offer(self, number: int) -> bool:
        """Plan, and tell all; whether there was anything to tell."""
        pulses, standing = self._here(), self._standing()
        self._learn(number, standing.steps)
        for node in self._suspects.of(number):
            pulses.pop(node, None)
        try:
            message = await self._planner.plan(number, standing, pulses, self._roster.round_trips(), self._meets())
        except Lacking as lacking:
            if str(lacking) != self.lacking:
                log.warning("round %d waits: %s", number, lacking)
            self.lacking = str(lacking)
            self._suspects.clear(self._suspects.of(number))
            return False
        self.lacking, self._tried = "", (standing.steps, [*message.nodes])
        if self._coming() != number:
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
        """From what became of the last plan."""
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

    # --- everybody -------------------------------------------------------------------------------

    async def _take(self, _sender: str, message: IterationPlan) -> Ack:
        plan = Plan.read(message, self._stages, self._planner.seed)
        with suppress(TimeoutError):
            async with asyncio.timeout(LATE):  # it may come a moment before this site is done with the last round
                await self._news.until(lambda: self._open >= plan.round)
        number, standing = self._open, self._standing()
        if plan.round != number or message.step != standing.steps:
            raise BadMessage(f"a plan of round {plan.round} after {message.step} steps: this site is at {number}")
        if plan.message.meet != self._meets():
            raise BadMessage(f"an iteration where replicas meet, or the reverse, in round {plan.round}")
        if number in self._taken or number <= self._closed:
            raise BadMessage("this site has a plan for that round already, or has done without one")
        given = dict(zip(message.candidates, message.newcomers)) | plan.stages
        stage = given.get(self._carrier.node)
        if stage is None:
            raise BadMessage("this site has no place in that plan")
        await self._hold(stage, standing, taking_part=self._carrier.node in plan.stages)
        if self._taken.setdefault(number, plan) is not plan:
            raise BadMessage("this site has just taken another plan for that round")
        self._news.notify()
        return Ack()

    async def _hold(self, stage: int, standing: Standing, taking_part: bool) -> None:
        """Hold the stage that the plan gives this site. Raises BadMessage: it has another one, or not this version."""
        stage_state = self._stage_state
        if stage_state.stage is None:
            await asyncio.to_thread(stage_state.hold, stage)
        if stage_state.stage != stage or (taking_part and stage_state.version != standing.versions[stage]):
            raise BadMessage(f"this site holds stage {stage_state.stage} in version {stage_state.version}")
