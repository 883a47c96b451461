"""Plans an attempt: which sites take part, with which stage, and the path of every microbatch.

The planner is the live elector with the lowest id (pipeline/plan_delivery.py). Paths come from pipeline/planning, which
is pure and runs at the site, so the loss of the coordinator stops nothing. At the start of a run, sites are assigned to
stages together with the paths. From then on they keep their stages.

The problem consists of the settings of [pipeline], with the measured or estimated times of sites and links. A site
reports the median times of its own tasks, and of its transfers to sites that it has sent anything to. Sites send one
tensor at a time, so a transfer time is also the time that the uplink is occupied.

The search for better paths runs while iterations continue with the current ones: no site waits for it. One search runs
at a time, for the latest problem. A pause follows each search, because it takes a CPU core of the planning site.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.path_search import Search, Searching
from pier_node.pipeline.planning.plan import Plan, random_plan, random_routes, random_waves
from pier_node.pipeline.planning.problem import Problem, Rules, Site, stage_sizes
from pier_node.pipeline.vote_state import VoteState, can_decide
from pier_proto.v1.peer_pb2 import IterationPlan, Path, Place, Pulse

log = logging.getLogger(__name__)

UNKNOWN = Place(forward=0.1, backward=0.2, loss=0.03)
"""Assumed seconds of tasks until some are measured. Only their ratios matter until then."""
SHORTEST = 1e-4
DRIFT, NOISE = 1.5, 0.1
"""Relative change of any time that makes new paths worth planning, unless it is below NOISE, a part of a visit's time.

The factor is 1.5 in either direction; the part is a tenth of the time of a visit to a site.
"""


def with_times(problem: Problem, places: Mapping[str, Place], round_trips: Mapping[str, float]) -> Problem:
    """The problem for these sites, in their order, with the currently known times.

    Args:
        round_trips: seconds from the planner to other sites, by node id.
    """
    lines = {node: _middle(it.transfer.values()) for node, it in places.items()}
    usual = _middle(filter(None, lines.values()))
    transfers = tuple(tuple(_transfer(a, b, places, lines[a] or usual, round_trips) for b in places) for a in places)
    uplinks = tuple(lines[node] or usual for node in places) if usual else ()
    return replace(problem, sites=sites_of(places), transfer_s=transfers, uplink_s=uplinks)


def sites_of(places: Mapping[str, Place]) -> tuple[Site, ...]:
    """Sites with their times. A site without measurements gets the median of the others."""
    known = [place for place in places.values() if place.forward and place.backward]
    like = UNKNOWN
    if known:
        forward, backward = _middle(it.forward for it in known), _middle(it.backward for it in known)
        like = Place(forward=forward, backward=backward, loss=_middle(it.loss for it in known if it.loss))
    times = {node: it if it.forward and it.backward else like for node, it in places.items()}
    return tuple(
        Site(node, it.forward, it.backward, it.loss, max(places[node].memory, 1)) for node, it in times.items()
    )


def drifted(before: Problem, now: Problem) -> bool:
    """Whether anything takes so much longer or shorter than before that other paths may be better."""
    pairs = list(zip(_seconds(before), _seconds(now), strict=True))
    tasks = [new for _, new in pairs[: len(now.sites)]]
    visit = median(tasks) + 2 * _middle(new for _, new in pairs[len(now.sites) :])
    return any(max(it) > DRIFT * min(it) and max(it) - min(it) > NOISE * visit for it in pairs)


def _seconds(problem: Problem) -> list[float]:
    """Seconds of a microbatch's tasks at each site, then of the transfers."""
    between = [s for a, row in enumerate(problem.transfer_s) for b, s in enumerate(row) if a != b]
    return [*(site.forward_s + site.backward_s for site in problem.sites), *between]


def _transfer(
    source: str, target: str, places: Mapping[str, Place], usual: float, round_trips: Mapping[str, float]
) -> float:
    """Seconds from site to site: the sender's measurement, or else the usual time, or else half a round trip."""
    if source == target:
        return 0.0
    if seconds := places[source].transfer.get(target, 0.0) or usual:
        return seconds
    ways = [round_trips[node] for node in (source, target) if node in round_trips]
    return max(sum(ways) / len(ways) / 2, SHORTEST) if ways else SHORTEST


def _middle(values: Iterable[float]) -> float:
    found = [*values]
    return median(found) if found else 0.0


TRIES = 16
"""Number of random first plans to try for each number of waves."""


def build_problem(
    section: PipelineSection, places: Mapping[str, Place], round_trips: Mapping[str, float], seed: int
) -> tuple[Problem, Plan]:
    """The problem of sites that may hold any stage, as at the start of a run, and a valid plan.

    Args:
        places: of the sites, in the order of the problem; their stages are ignored.

    Raises:
        PierError: too few sites, or too little memory.
    """
    sizes = stage_sizes(len(places), section.stages, section.path_length)
    return drawn(section, sizes, places, round_trips, None, seed)


def drawn(
    section: PipelineSection,
    sizes: tuple[int, ...],
    places: Mapping[str, Place],
    round_trips: Mapping[str, float],
    stages: tuple[tuple[int, ...], ...] | None,
    seed: int,
) -> tuple[Problem, Plan]:
    """The problem with as few waves as memory allows, and a valid plan; with `stages`, sites keep their stages.

    Raises PierError: no number of waves is enough.
    """
    length, apart = min(section.path_length, len(sizes)), ((0.0,) * len(places),) * len(places)
    rules = Rules(max_swaps=section.swaps, max_jump=section.max_jump or max(len(sizes) - 1, 1))
    for waves in range(1, section.microbatches + 1):
        blank = Problem(sites_of(places), apart, sizes, length, section.microbatches, waves, rules)
        problem = with_times(blank, places, round_trips)
        for number in range(seed, seed + TRIES):
            try:
                if stages is None:
                    return problem, random_plan(problem, number)
                return problem, Plan(stages, random_waves(problem, stages, random.Random(number)))
            except (PierError, ValueError):  # no site of a stage has free memory
                continue
    raise PierError(
        f"no paths of {length} stages over stages of {[*sizes]} sites keep the memory of {section.memory} microbatches",
        "Raise pipeline.memory, or lower pipeline.skip.",
    )


Told = Callable[[int, Problem, Plan], None]
PROMPT = 3.0
"""Seconds, beyond those of the search, that all sites wait for paths when the set of sites has changed."""


class Lacking(Exception):
    """Nothing can be planned. The message says which sites the run waits for."""


@dataclass(frozen=True)
class Participants:
    """The sites of a plan, with what is known of them. They are equal if the same sites hold the same stages.

    Attributes:
        held: the stage of each site, by node id, in the order of node ids.
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
        full_from: the iteration from which on all microbatches visit all stages that have sites.
        told: called with the round, its problem with the currently known times, and its plan.

    Attributes:
        searching: the search for better paths than those of the last plan.
    """

    def __init__(self, section: PipelineSection, seed: int, full_from: int, told: Told, search: Search) -> None:
        self._section, self.seed, self._told, self._search = section, seed, told, search
        self._full_from, self._full = full_from, section.model_copy(update={"paths": "full"})
        self.searching = Searching(search)
        self._last: tuple[tuple[Participants, PipelineSection], Problem, Plan] | None = None

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
            meet: it is an outer round of the replicas. In such a round, a stage without sites stays as it is.

        Raises:
            Lacking: stages that paths must visit have no site, or most of the electors here lack the last step.
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
        electors = voted.electors & pulses.keys()  # if others are gone, they cost an empty round at most
        if not can_decide(well, electors):
            behind = ", ".join(sorted(electors - well.keys()))
            raise Lacking(f"most of the sites that took the last step lack it now, and must catch up first: {behind}")
        well = dict(sorted(well.items()))
        there = Participants({node: place.stage for node, place in well.items()}, well, round_trips)
        plan = None if meet else await self._planned(round, voted.steps, there)
        message = _message(round, voted.steps, there.held, plan.waves if plan else ())
        _admit(message, {node: stage for node, stage in given.items() if node not in fresh})
        return message

    async def _first(
        self, round: int, voted: VoteState, nodes: Sequence[str], round_trips: Mapping[str, float]
    ) -> IterationPlan:
        """The first plan: all sites are new and are assigned to stages, too. Electors take part even if on no path."""
        section = self._section
        if len(nodes) < section.stages:
            raise Lacking(f"{len(nodes)} sites are here for {section.stages} stages: start the others")
        blank = {node: Place(memory=section.memory) for node in nodes}
        problem, plan = build_problem(section, blank, round_trips, self.seed)
        if section.paths == "random":
            problem, plan = _permuted(problem, plan.stages, self.seed, voted.steps)
        else:
            plan = await self._search(problem, self.seed, section.plan_seconds, plan, False)
        held = plan.stage_of()
        stages = {nodes[site]: stage for site, stage in held.items()}
        idle = [node for node in nodes if node not in stages]
        given = self._given(idle, {node: Place(stage=stage) for node, stage in stages.items()}, {})
        stages |= {node: stage for node, stage in given.items() if node in voted.electors}
        number = {node: position for position, node in enumerate(sorted(stages))}
        waves = [[[number[nodes[site]] for site in path] for path in wave] for wave in plan.waves]
        message = _message(round, voted.steps, dict(sorted(stages.items())), waves)
        _admit(message, {node: stage for node, stage in given.items() if node not in stages})
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

    async def _planned(self, round: int, step: int, there: Participants) -> Plan:
        section = self._section if step < self._full_from else self._full
        if section.paths == "random":
            problem, plan = self._planned_again(round, there, section)
            problem, plan = _permuted(problem, plan.stages, self.seed, step)
        else:
            problem, plan = await self._sought(round, there, section)
        self._told(round, problem, plan)
        return plan

    async def _sought(self, round: int, there: Participants, section: PipelineSection) -> tuple[Problem, Plan]:
        """The best paths known. If the sites' times have changed, a search for better ones begins."""
        seconds, about = section.plan_seconds, (there, section)
        if self._last is None or self._last[0] != about:
            problem, plan = self._planned_again(round, there, section)
            await self.searching.begin(problem, self.seed, seconds, plan)
            await self.searching.wait(seconds + PROMPT)
            self._last = about, problem, self.searching.found() or plan
            log.info("round %d: paths over %d sites, planned again", round, len(there.held))
            return self._last[1:]
        _, searched, plan = self._last
        problem = with_times(searched, there.places, there.round_trips)
        if better := self.searching.found():
            self._last = about, searched, better
            log.info("round %d: better paths over %d sites", round, len(there.held))
            return problem, better
        if self.searching.idle and drifted(searched, problem):
            self._last = about, problem, plan
            await self.searching.begin(problem, self.seed, seconds, plan)
        return problem, plan

    def _planned_again(self, round: int, there: Participants, section: PipelineSection) -> tuple[Problem, Plan]:
        """The problem of these sites, with any valid plan."""
        sizes, seed = tuple(len(sites) for sites in there.stages), self.seed + TRIES * round
        return drawn(section, sizes, there.places, there.round_trips, there.stages, seed)

    def _given(self, strangers: Sequence[str], well: Mapping[str, Place], wanted: Mapping[str, int]) -> dict[str, int]:
        """A stage for each site without one: what the operator wants, one that has no replica, or else the slowest.

        How slow a stage is: its share of all visits, over the sum of the speeds of its sites.
        """
        stages, later = range(self._section.stages), (self._section.path_length - 1) / (self._section.stages - 1)
        given = {node: stage for node, stage in wanted.items() if stage in stages}
        speeds = [1 / (it.forward_s + it.backward_s + it.loss_s) for it in sites_of(well)]
        usual = _middle(speeds) or 1.0
        sites = [(place.stage, speed) for place, speed in zip(well.values(), speeds, strict=True)]
        sites += [(stage, usual) for stage in given.values()]

        def done(stage: int) -> tuple[int, float, int]:
            mine = [speed for it, speed in sites if it == stage]
            return min(len(mine), 2), sum(mine) / (later if stage else 1.0), stage

        for node in strangers:
            if node not in given:
                given[node] = min(stages, key=done)
                sites.append((given[node], usual))
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
