"""Plans an attempt: which sites take part, with which stage, and the path of every microbatch.

The planner is the live site with the lowest id. Paths come from pipeline/planning, which is pure and runs at the site,
so the loss of the coordinator stops nothing. At the start of a run, sites are assigned to stages together with the
paths. From then on they keep their stages.

The search for better paths runs while iterations continue with the current ones: no site waits for it. One search runs
at a time, for the latest problem. A pause follows each search, because it takes a CPU core of the planning site.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.problem import TRIES, drawn, drifted, posed, with_times
from pier_node.pipeline.search_process import search_apart
from pier_node.pipeline.vote_state import Standing
from pier_proto.v1.peer_pb2 import IterationPlan, Path, Place, Pulse

if TYPE_CHECKING:
    from pier_node.pipeline.planning.plan import Plan
    from pier_node.pipeline.planning.problem import Problem


Search = Callable[["Problem", int, float, "Plan", bool], Awaitable["Plan"]]
"""(problem, seed, seconds, a valid plan, whether stages stay) -> a better plan."""
REST = 5.0
"""Length of the pause after a search, in multiples of the search's duration.

In the pause, changed times of sites start no new search.
"""


class Searching:
    """The running search, if any."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._task: asyncio.Task[Plan] | None = None
        self._rested = 0.0

    @property
    def idle(self) -> bool:
        """Whether no search is running and the pause after the last one is over."""
        return self._task is None and asyncio.get_running_loop().time() >= self._rested

    async def begin(self, problem: Problem, seed: int, seconds: float, current: Plan) -> None:
        """Start a search for paths over the same stages, and stop the previous one."""
        await self.close()
        self._task = asyncio.create_task(self._timed(problem, seed, seconds, current))

    async def wait(self, seconds: float) -> None:
        """Return once the search is over, or after that many seconds."""
        if self._task:
            await asyncio.wait({self._task}, timeout=seconds)

    def found(self) -> Plan | None:
        """The plan that a finished search has found; each plan is returned once."""
        if self._task is None or not self._task.done():
            return None
        plan, self._task = self._task.result(), None
        return plan

    async def close(self) -> None:
        """Stop the running search."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _timed(self, problem: Problem, seed: int, seconds: float, current: Plan) -> Plan:
        now = asyncio.get_running_loop().time
        began = now()
        plan = await self._search(problem, seed, seconds, current, True)
        self._rested = now() + REST * (now() - began)
        return plan


Told = Callable[[int, "Problem", "Plan"], None]
PROMPT = 3.0
"""Seconds, beyond those of the search, that all sites wait for paths when the set of sites has changed."""

log = logging.getLogger(__name__)


class Lacking(Exception):
    """Nothing can be planned. The message says which sites the run waits for."""


@dataclass(frozen=True)
class Crew:
    """The sites of a plan in node-id order. `stages`: for each stage that has sites, their indices in `nodes`."""

    nodes: tuple[str, ...]
    numbers: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]


class Planner:
    """Plans attempts, and keeps the last plan in use as long as nothing has changed.

    Args:
        told: called with the round, its problem with the currently known times, and its plan.

    Attributes:
        searching: the search for better paths than those of the last plan.
    """

    def __init__(self, section: PipelineSection, seed: int, told: Told, search: Search = search_apart) -> None:
        self._section, self.seed, self._told, self._search = section, seed, told, search
        self.searching = Searching(search)
        self._last: tuple[Crew, Problem, Plan] | None = None

    async def plan(
        self,
        round: int,
        standing: Standing,
        pulses: Mapping[str, Pulse],
        round_trips: Mapping[str, float],
        meet: bool = False,
    ) -> IterationPlan:
        """The plan of the attempt that a round will decide.

        Args:
            pulses: of the live sites that take part in rounds, this one included.
            round_trips: seconds from this site to others, by node id.
            meet: it is an outer round of the replicas. In such a round, a stage without sites stays as it is.

        Raises:
            Lacking: stages that paths must visit have no site.
            PierError: no plan is possible within memory or the rules of paths.
        """
        places = {node: pulse.place for node, pulse in sorted(pulses.items()) if pulse.HasField("place")}
        strangers = {node: pulse for node, pulse in sorted(pulses.items()) if node not in places}
        wanted = {node: it.wanted_stage for node, it in strangers.items() if it.HasField("wanted_stage")}
        if not places and not wanted and not any(standing.versions):
            return await self._first(round, standing, [*strangers], round_trips)
        well = {node: it for node, it in places.items() if it.version == standing.versions[it.stage]}
        given = self._given([*strangers], well, wanted)
        fresh = {node: stage for node, stage in given.items() if standing.versions[stage] == 0}
        well |= {node: Place(stage=stage, memory=self._section.memory) for node, stage in fresh.items()}
        crew = self._crew(well, places, meet)
        plan = None if meet else (await self._planned(round, standing.steps, crew, well, round_trips))[1]
        message = _message(round, standing.steps, crew, plan)
        _admit(message, {node: stage for node, stage in given.items() if node not in fresh})
        return message

    async def _first(
        self, round: int, standing: Standing, nodes: Sequence[str], round_trips: Mapping[str, float]
    ) -> IterationPlan:
        """The first plan: all sites are new and are assigned to stages, too."""
        section = self._section
        if len(nodes) < section.stages:
            raise Lacking(f"{len(nodes)} sites are here for {section.stages} stages: start the others")
        blank = {node: Place(memory=section.memory) for node in nodes}
        problem, plan = posed(section, blank, round_trips, self.seed)
        if section.paths == "random":
            problem, plan = _permuted(problem, plan.stages, self.seed, standing.steps)
        else:
            plan = await self._search(problem, self.seed, section.plan_seconds, plan, False)
        held = plan.stage_of()
        used = [index for index in range(len(nodes)) if index in held]
        place = {index: position for position, index in enumerate(used)}
        crew = _crew_of({nodes[index]: held[index] for index in used})
        waves = [[tuple(place[site] for site in path) for path in wave] for wave in plan.waves]
        message = _message(round, standing.steps, crew, _plan(crew, waves))
        idle = [node for index, node in enumerate(nodes) if index not in held]
        _admit(message, self._given(idle, dict(zip(crew.nodes, (Place(stage=it) for it in message.stages))), {}))
        return message

    def _crew(self, well: Mapping[str, Place], places: Mapping[str, Place], meet: bool) -> Crew:
        """The sites that take part. Raises Lacking."""
        section, there = self._section, {place.stage for place in well.values()}
        if (there and meet) or (0 in there and len(there) >= section.path_length):
            return _crew_of({node: place.stage for node, place in well.items()})
        absent = sorted(set(range(section.stages)) - there)
        behind = [node for node, place in places.items() if node not in well and place.stage in absent]
        who = f", among them {', '.join(behind)}, which must catch up first" if behind else ""
        raise Lacking(f"stages {', '.join(map(str, absent))} have no site{who}: start those that held them")

    async def _planned(
        self, round: int, step: int, crew: Crew, well: Mapping[str, Place], round_trips: Mapping[str, float]
    ) -> tuple[Problem, Plan]:
        section, there = self._section, {node: well[node] for node in crew.nodes}
        if section.paths == "random":
            problem, plan = self._anew(round, crew, there, round_trips)
            problem, plan = _permuted(problem, plan.stages, self.seed, step)
        else:
            problem, plan = await self._sought(round, crew, there, round_trips)
        self._told(round, problem, plan)
        return problem, plan

    async def _sought(
        self, round: int, crew: Crew, there: Mapping[str, Place], round_trips: Mapping[str, float]
    ) -> tuple[Problem, Plan]:
        """The best paths known. If the sites' times have changed, a search for better ones begins."""
        seconds = self._section.plan_seconds
        if self._last is None or self._last[0] != crew:
            problem, plan = self._anew(round, crew, there, round_trips)
            await self.searching.begin(problem, self.seed, seconds, plan)
            await self.searching.wait(seconds + PROMPT)
            self._last = crew, problem, self.searching.found() or plan
            log.info("round %d: paths over %d sites, planned anew", round, len(crew.nodes))
            return self._last[1:]
        _, searched, plan = self._last
        problem = with_times(searched, there, round_trips)
        if better := self.searching.found():
            self._last = crew, searched, better
            log.info("round %d: better paths over %d sites", round, len(crew.nodes))
            return problem, better
        if self.searching.idle and drifted(searched, problem):
            self._last = crew, problem, plan
            await self.searching.begin(problem, self.seed, seconds, plan)
        return problem, plan

    def _anew(
        self, round: int, crew: Crew, there: Mapping[str, Place], round_trips: Mapping[str, float]
    ) -> tuple[Problem, Plan]:
        """The problem of a crew, with any valid plan."""
        sizes = tuple(len(sites) for sites in crew.stages)
        length = min(self._section.path_length, len(sizes))
        return drawn(self._section, sizes, length, there, round_trips, crew.stages, self.seed + TRIES * round)

    def _given(self, strangers: Sequence[str], well: Mapping[str, Place], wanted: Mapping[str, int]) -> dict[str, int]:
        """A stage for each site without one: the stage that the operator wants, or else the one with fewest sites."""
        stages = range(self._section.stages)
        given = {node: stage for node, stage in wanted.items() if stage in stages}
        count = Counter([*(place.stage for place in well.values()), *given.values()])
        for node in strangers:
            if node not in given:
                given[node] = min(stages, key=lambda it: (count[it], it))
                count[given[node]] += 1
        return given


def _admit(message: IterationPlan, given: Mapping[str, int]) -> None:
    message.candidates.extend(given)
    message.newcomers.extend(given.values())


def _crew_of(held: Mapping[str, int]) -> Crew:
    nodes = tuple(sorted(held))
    numbers = tuple(sorted({*held.values()}))
    stages = tuple(tuple(index for index, node in enumerate(nodes) if held[node] == number) for number in numbers)
    return Crew(nodes, numbers, stages)


def _plan(crew: Crew, waves: Sequence[Sequence[Sequence[int]]]) -> Plan:
    from pier_node.pipeline.planning.plan import Plan

    return Plan(crew.stages, tuple(tuple(tuple(path) for path in wave) for wave in waves))


def _message(round: int, step: int, crew: Crew, plan: Plan | None) -> IterationPlan:
    held = {site: crew.numbers[index] for index, sites in enumerate(crew.stages) for site in sites}
    return IterationPlan(
        round=round,
        step=step,
        nodes=crew.nodes,
        stages=[held[index] for index in range(len(crew.nodes))],
        paths=[Path(sites=path) for path in plan.paths] if plan else (),
        waves=[len(wave) for wave in plan.waves] if plan else (),
        meet=plan is None,
    )


def _permuted(problem: Problem, stages: tuple[tuple[int, ...], ...], seed: int, step: int) -> tuple[Problem, Plan]:
    """Random paths in as few waves as memory allows. With one microbatch per wave, any memory is enough."""
    from pier_node.pipeline.planning.routing import random_routes

    for waves in range(1, problem.microbatches):
        with suppress(PierError):
            wider = replace(problem, waves=waves)
            return wider, random_routes(wider, stages, seed, step)
    single = replace(problem, waves=problem.microbatches)
    return single, random_routes(single, stages, seed, step)
