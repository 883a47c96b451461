"""Plans an attempt: which sites take part, with which stage, and the path of every microbatch.

The planner is the live site with the lowest id. Paths come from pipeline/planning, which is pure and runs at the site,
so the loss of the coordinator stops nothing. At the start of a run, sites are assigned to stages together with the
paths. From then on they keep their stages.

The search for better paths runs while iterations continue with the current ones: no site waits for it. One search runs
at a time, for the latest problem. A pause follows each search, because it takes a CPU core of the planning site.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.path_search import Search, Searching, search_apart
from pier_node.pipeline.planning.plan import Plan, random_routes
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.problem import TRIES, drawn, drifted, posed, with_times
from pier_node.pipeline.vote_state import VoteState
from pier_proto.v1.peer_pb2 import IterationPlan, Path, Place, Pulse

Told = Callable[[int, Problem, Plan], None]
PROMPT = 3.0
"""Seconds, beyond those of the search, that all sites wait for paths when the set of sites has changed."""

log = logging.getLogger(__name__)


class Lacking(Exception):
    """Nothing can be planned. The message says which sites the run waits for."""


@dataclass(frozen=True)
class Crew:
    """The sites of a plan, with what is known of them. Crews are equal if the same sites hold the same stages.

    Attributes:
        held: the stage of each site, by node id, in the order of node ids.
        places: of the same sites.
        round_trips: seconds from the planner to other sites, by node id.
    """

    held: Mapping[str, int]
    places: Mapping[str, Place] = field(compare=False)
    round_trips: Mapping[str, float] = field(compare=False)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """For each stage that has sites, their positions in `held`."""
        held = [*self.held.values()]
        return tuple(tuple(site for site, it in enumerate(held) if it == stage) for stage in sorted({*held}))


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
        voted: VoteState,
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
        if not places and not wanted and not any(voted.versions):
            return await self._first(round, voted, [*strangers], round_trips)
        well = {node: it for node, it in places.items() if it.version == voted.versions[it.stage]}
        given = self._given([*strangers], well, wanted)
        fresh = {node: stage for node, stage in given.items() if voted.versions[stage] == 0}
        well |= {node: Place(stage=stage, memory=self._section.memory) for node, stage in fresh.items()}
        self._require_enough(well, places, meet)
        well = dict(sorted(well.items()))
        crew = Crew({node: place.stage for node, place in well.items()}, well, round_trips)
        plan = None if meet else await self._planned(round, voted.steps, crew)
        message = _message(round, voted.steps, crew.held, plan.waves if plan else ())
        _admit(message, {node: stage for node, stage in given.items() if node not in fresh})
        return message

    async def _first(
        self, round: int, voted: VoteState, nodes: Sequence[str], round_trips: Mapping[str, float]
    ) -> IterationPlan:
        """The first plan: all sites are new and are assigned to stages, too."""
        section = self._section
        if len(nodes) < section.stages:
            raise Lacking(f"{len(nodes)} sites are here for {section.stages} stages: start the others")
        blank = {node: Place(memory=section.memory) for node in nodes}
        problem, plan = posed(section, blank, round_trips, self.seed)
        if section.paths == "random":
            problem, plan = _permuted(problem, plan.stages, self.seed, voted.steps)
        else:
            plan = await self._search(problem, self.seed, section.plan_seconds, plan, False)
        held = plan.stage_of()
        number = {site: position for position, site in enumerate(sorted(held))}
        stages = {nodes[site]: held[site] for site in number}
        waves = [[[number[site] for site in path] for path in wave] for wave in plan.waves]
        message = _message(round, voted.steps, stages, waves)
        idle = [node for node in nodes if node not in stages]
        _admit(message, self._given(idle, {node: Place(stage=stage) for node, stage in stages.items()}, {}))
        return message

    def _require_enough(self, well: Mapping[str, Place], places: Mapping[str, Place], meet: bool) -> None:
        """Raise Lacking unless the sites that have the last step of their stages are enough for a plan."""
        section, there = self._section, {place.stage for place in well.values()}
        if (there and meet) or (0 in there and len(there) >= section.path_length):
            return
        absent = sorted(set(range(section.stages)) - there)
        behind = [node for node, place in places.items() if node not in well and place.stage in absent]
        who = f", among them {', '.join(behind)}, which must catch up first" if behind else ""
        raise Lacking(f"stages {', '.join(map(str, absent))} have no site{who}: start those that held them")

    async def _planned(self, round: int, step: int, crew: Crew) -> Plan:
        if self._section.paths == "random":
            problem, plan = self._planned_again(round, crew)
            problem, plan = _permuted(problem, plan.stages, self.seed, step)
        else:
            problem, plan = await self._sought(round, crew)
        self._told(round, problem, plan)
        return plan

    async def _sought(self, round: int, crew: Crew) -> tuple[Problem, Plan]:
        """The best paths known. If the sites' times have changed, a search for better ones begins."""
        seconds = self._section.plan_seconds
        if self._last is None or self._last[0] != crew:
            problem, plan = self._planned_again(round, crew)
            await self.searching.begin(problem, self.seed, seconds, plan)
            await self.searching.wait(seconds + PROMPT)
            self._last = crew, problem, self.searching.found() or plan
            log.info("round %d: paths over %d sites, planned again", round, len(crew.held))
            return self._last[1:]
        _, searched, plan = self._last
        problem = with_times(searched, crew.places, crew.round_trips)
        if better := self.searching.found():
            self._last = crew, searched, better
            log.info("round %d: better paths over %d sites", round, len(crew.held))
            return problem, better
        if self.searching.idle and drifted(searched, problem):
            self._last = crew, problem, plan
            await self.searching.begin(problem, self.seed, seconds, plan)
        return problem, plan

    def _planned_again(self, round: int, crew: Crew) -> tuple[Problem, Plan]:
        """The problem of a crew, with any valid plan."""
        sizes, seed = tuple(len(sites) for sites in crew.stages), self.seed + TRIES * round
        return drawn(self._section, sizes, crew.places, crew.round_trips, crew.stages, seed)

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


def _message(round: int, step: int, held: Mapping[str, int], waves: Sequence[Sequence[Sequence[int]]]) -> IterationPlan:
    """A plan's message.

    Args:
        held: the stage of each site, by node id.
        waves: the paths of each wave, over positions in `held`; none if it is an outer round of the replicas.
    """
    return IterationPlan(
        round=round,
        step=step,
        nodes=[*held],
        stages=[*held.values()],
        paths=[Path(sites=path) for wave in waves for path in wave],
        waves=[len(wave) for wave in waves],
        meet=not waves,
    )


def _permuted(problem: Problem, stages: tuple[tuple[int, ...], ...], seed: int, step: int) -> tuple[Problem, Plan]:
    """Random paths in as few waves as memory allows. With one microbatch per wave, any memory is enough."""
    for waves in range(1, problem.microbatches):
        with suppress(PierError):
            wider = replace(problem, waves=waves)
            return wider, random_routes(wider, stages, seed, step)
    single = replace(problem, waves=problem.microbatches)
    return single, random_routes(single, stages, seed, step)
