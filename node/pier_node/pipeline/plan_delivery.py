"""How the sites of a round get their iteration plan: the planner sends it to all, and each takes one plan per round.

An error here costs only an attempt, because a step needs all sites of one plan to be ready for it.

The planner is the live elector (pipeline/vote_state.py) with the lowest id, so that no site that has just come can put
itself in front of all others. A site takes a plan only from the planner. Sites learn at different times who is there:
one that does not see the sender as the planner waits until it does, or another plan comes, for at most VIEWS seconds.
Of two sites that both think they plan, the one gives up its plan that gets the other's and sees that it is wrong. What
most of the electors say they do decides how long others wait for a plan; what any other site says does not. If a round
ends empty for want of a plan, the elector with the next lowest id plans the next one, without the planner before.

A site that caused an attempt to fail, as far as the planner knows, is left out of the next plan, so that the iteration
can complete. If it fails again as soon as it is back in a plan, it is left out of twice as many rounds, and so on. This
happens for example with two sites whose link is cut while all other sites can reach both. In the same way a newcomer
that does not answer is offered a stage less and less often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NoReturn

from pier_node.base.tasks import Signal, first_of
from pier_node.pipeline.context import Position, Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import drop
from pier_node.pipeline.planner import Lacking, Planner
from pier_node.pipeline.stage_state import StageState
from pier_node.pipeline.vote_state import Turn, VoteState, can_decide
from pier_node.rounds.quorum import leader_of
from pier_node.rounds.roster import LATE, first_away
from pier_node.rounds.suspects import NOBODY
from pier_node.wire.carrier import ROUTE, BadMessage, PeerLost, PeerRefused
from pier_proto.v1.peer_pb2 import Ack, IterationPlan, Phase, Pulse

MOST = 8
"""Maximum number of rounds for which a site is left out."""


class Suspects:
    """The sites to leave out of the plan of a round, or not to let plan it."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[int, int]] = {}

    def add(self, node: str, round: int) -> None:
        """Record that the round before this one, or its attempt, failed because of a site."""
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
NEWCOMER_TIMEOUT = 10.0
"""The same for a site that gets a stage and takes no part yet: all others wait for it meanwhile."""
PATIENCE = 120.0
"""Seconds to wait for a plan. The first search is compiled, which may take that long on a slow machine."""
CATCHING_UP = 100.0
"""Seconds that the planner waits for a site that fetches its stage.

If the site fails to get it, the planner waits for it again this many seconds later.
"""
FORGOTTEN = 2 * CATCHING_UP
"""Seconds after which a site that is away is waited for anew once it is back, as if it had never been there.

So a site that comes and goes holds up the others for half of the time at most.
"""
RETURN = 60.0
"""Seconds that the planner of the last outer round waits for the sites of a stage that are all away.

What they did apart since the round before would be in no model, because they would bring it to no other round.
"""
VIEWS = 30.0
"""Seconds after which all sites should see the same sites alive; less than a planner waits for them to take a plan."""
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
        self._offered = b""
        self._open, self._closed, self._late_after = 0, 0, 0.0
        self._behind: dict[str, float] = {}
        self.suspect, self.lacking = "", ""
        self._suspects, self._tried = Suspects(), (0, list[str]())
        self._idle, self._missed = Suspects(), ("", 0)  # as planners
        self._carrier.serve(ROUTE, self._take)

    async def plan(self, least: int, needless: Callable[[], bool]) -> Plan | None:
        """The plan of the next round; None: there is none and the round will be empty.

        Args:
            least: number of sites that must be present before the first plan.
            needless: returns whether others are at a later round, or this site should pause.
        """
        loop, number = asyncio.get_running_loop(), self._position.coming
        planner, steps = self._missed
        if planner and self._position.voted.steps == steps:
            log.warning("round %d was empty: %s sent no plan, and plans no round for a while", number - 1, planner)
            self._idle.add(planner, number)
        self._missed = "", 0
        self._open, self._late_after = number, loop.time() + LATE
        self._news.notify()
        deadline, returned = loop.time() + PATIENCE, loop.time() + RETURN
        while number not in self._taken and loop.time() < deadline and not needless():
            mine = self._plans() == self._carrier.node
            complete = len(self._here()) >= max(least, len(self._here(late=True)))
            if self._others_wait(number):
                break  # they are done with it, whoever planned it
            waits = self._awaits() or (self._lacks_last() and loop.time() < returned)
            if mine and complete and not waits and not self._others_work(number) and await self._offer(number):
                break
            await self._heard()
            if least > 1 or self.lacking or self._others_work(number):
                deadline = loop.time() + PATIENCE  # some sites have yet to arrive, or others work without this one
        found, planner = self._taken.pop(number, None), self._plans()
        if found:
            self._idle.clear([planner])
        elif planner != self._carrier.node and not needless():
            self._missed = planner, self._position.voted.steps
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

    def _plans(self) -> str:
        """The site that plans the next round, as far as this site can see."""
        here, voted = {*self._here(late=True)}, self._position.voted
        planning = (here & voted.electors) - self._idle.of(self._position.coming)
        return leader_of(planning or here, voted.electors)

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
        for node in [node for node, since in self._behind.items() if node not in pulses and now >= since + FORGOTTEN]:
            del self._behind[node]
        for node, it in pulses.items():
            if it.place.version == versions[it.place.stage]:
                self._behind.pop(node, None)
            elif it.training_for == at + 1 and it.phase != Phase.PHASE_CATCHING_UP:
                self._behind[node] = now + CATCHING_UP
            elif it.round == at or it.phase == Phase.PHASE_CATCHING_UP:
                self._behind.setdefault(node, now)
        awaited = {*pulses} - self._suspects.of(at + 1)
        return any(since <= now < since + CATCHING_UP for node, since in self._behind.items() if node in awaited)

    def _lacks_last(self) -> bool:
        """Whether a stage has no site here for the last outer round."""
        last = self._meets and self._position.voted.steps >= self._position.config.inner.total_steps
        return last and len({it.place.stage for it in self._here().values() if it.HasField("place")}) < self._stages

    def _others_wait(self, number: int) -> bool:
        """Whether an attempt at this round has ended somewhere, or all do without."""
        return any(it.phase in BUSY for it in self._electors_at(number))

    def _others_work(self, number: int) -> bool:
        """Whether others work on an attempt at this round. A site that enters the round before them would end it."""
        return any(it.place.working for it in self._electors_at(number))

    def _electors_at(self, number: int) -> list[Pulse]:
        """The other electors that work on this round or wait for it, if they are the most: others cannot make it count.

        So a single one that is early or lies keeps nobody from a plan.
        """
        pulses, electors = self._roster.participants(), self._position.voted.electors
        others = [it for node, it in pulses.items() if node != self._carrier.node and node in electors]
        at = [it for it in others if it.training_for == number and (it.phase in BUSY or it.place.working)]
        return at if 2 * len(at) > len(others) else []

    async def _heard(self) -> None:
        """Return on any news, or after LOOK seconds."""
        await first_of(self._news.wait(LOOK), self._roster.changed.wait(LOOK))

    # --- at the planner --------------------------------------------------------------------------

    async def _offer(self, number: int) -> bool:
        """Plan and send the plan to all sites. Returns whether there was a plan to send."""
        voted = self._position.voted
        self._learn(number, voted.steps)
        pulses = self._trusted(number, voted)
        try:
            message = await self._planner.plan(number, voted, pulses, self._roster.round_trips(), self._meets)
        except Lacking as lacking:
            if str(lacking) != self.lacking:
                log.warning("round %d waits: %s", number, lacking)
            self.lacking = str(lacking)
            self._suspects.clear(self._suspects.of(number))
            return False
        self.lacking, self._tried = "", (voted.steps, [*message.nodes])
        if self._position.coming == number:
            await self._send(message)
        return True

    def _trusted(self, number: int, voted: VoteState) -> dict[str, Pulse]:
        """The sites here without the suspects, or with them if a step without them would not count."""
        here, out = self._here(), self._suspects.of(number) | self._idle.of(number)
        rest = {node: it for node, it in here.items() if node not in out}
        if can_decide(rest, voted.electors & here.keys()):
            return rest
        self._suspects.clear(out)
        return here

    async def _send(self, message: IterationPlan) -> None:
        """Send a plan to all its sites; take it back if one does not take it."""
        number, name = message.round, self._read(message).name
        self._offered = name
        results = await asyncio.gather(*(self._tell(node, message) for node in [*message.nodes, *message.candidates]))
        self._offered = b""
        taken, lost = self._taken.get(number), next((it for it in results if it), None)
        if taken and taken.name != name:
            log.info("round %d: another site plans it", number)
            await self._recall(message, PeerLost(NOBODY, "another site plans this round"))
        elif lost:
            log.warning("round %d: the plan is dropped: %s", number, lost)
            self.suspect = lost.node
            self._taken.pop(number, None)
            await self._recall(message, lost)

    def _learn(self, number: int, steps: int) -> None:
        """Update the suspects from the outcome of the last plan."""
        before, nodes = self._tried
        if steps > before:
            self._suspects.clear(nodes)
        if self.suspect not in ("", self._carrier.node):
            self._suspects.add(self.suspect, number)
        self.suspect = ""

    async def _tell(self, node: str, message: IterationPlan) -> PeerLost | None:
        newcomer = node in message.candidates
        try:
            if node == self._carrier.node:
                await self._take(node, message)
            else:
                patience = NEWCOMER_TIMEOUT if newcomer else TELL_TIMEOUT
                await first_of(self._carrier.call(node, ROUTE, message, patience), self._until_away(node))
        except BadMessage as bad:
            return PeerLost(node, str(bad))
        except PeerLost as lost:
            if not newcomer:
                return lost
            if not isinstance(lost, PeerRefused):
                self._suspects.add(node, message.round + 1)
        return None

    async def _until_away(self, node: str) -> NoReturn:
        raise PeerLost(await first_away(self._roster, [node]), "it does not answer any more")

    async def _recall(self, message: IterationPlan, lost: PeerLost) -> None:
        name = self._read(message).name
        others = [node for node in message.nodes if node not in (self._carrier.node, lost.node)]
        await drop(self._carrier, others, name, lost.node, lost.reason, TELL_TIMEOUT)

    # --- at every site ---------------------------------------------------------------------------

    async def _take(self, sender: str, message: IterationPlan) -> Ack:
        plan = self._read(message)
        await self._within(LATE, lambda: self._open >= plan.round)  # it may arrive just before the last round has ended
        await self._within(
            VIEWS, lambda: self._open != plan.round or self._settled(plan.round) or sender == self._plans()
        )
        number, voted = self._open, self._position.voted
        if plan.round != number or message.step != voted.steps:
            raise BadMessage(f"a plan of round {plan.round} after {message.step} steps: this site is at {number}")
        if plan.message.meet != self._meets:
            raise BadMessage(f"an iteration where replicas meet, or the reverse, in round {plan.round}")
        if self._settled(number):
            raise BadMessage("this site has a plan for that round already, or has done without one")
        if sender != (planner := self._plans()):
            raise BadMessage(f"round {number} is planned by {planner}, as far as this site can see")
        given = dict(zip(message.candidates, message.newcomers)) | plan.stages
        stage = given.get(self._carrier.node)
        if stage is None:
            raise BadMessage("this site has no place in that plan")
        await self._hold(stage, voted, taking_part=self._carrier.node in plan.stages)
        if self._settled(number):
            raise BadMessage("this site has just taken another plan for that round")
        self._taken[number] = plan
        self._news.notify()
        return Ack()

    def _read(self, message: IterationPlan) -> Plan:
        return Plan.read(message, self._stages, self._planner.seed)

    def _settled(self, number: int) -> bool:
        """Whether this site takes no more plans of a round. Its own plan gives way to one that it accepts."""
        taken = self._taken.get(number)
        return number <= self._closed or (taken is not None and taken.name != self._offered)

    async def _within(self, seconds: float, settled: Callable[[], bool]) -> None:
        """Return once `settled()` holds, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not settled():
                    await self._heard()

    async def _hold(self, stage: int, voted: VoteState, taking_part: bool) -> None:
        """Hold the stage that the plan assigns. Raises BadMessage: this site holds another stage or version."""
        stage_state = self._stage_state
        if stage_state.stage is None:
            await asyncio.to_thread(stage_state.hold, stage)
        if stage_state.stage != stage or (taking_part and stage_state.version != voted.versions[stage]):
            having = f"in version {stage_state.version}" if stage_state.state else "and is still to fetch it"
            raise BadMessage(f"this site holds stage {stage_state.stage} {having}")
