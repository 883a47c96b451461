"""The planning problem of a run: the settings of [pipeline], with the measured or estimated times of sites and links.

A site reports the median times of its own tasks, and of its transfers to sites that it has sent anything to. Sites send
one tensor at a time, so a transfer time is also the time that the uplink is occupied.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.planning.plan import Plan, random_plan, random_waves
from pier_node.pipeline.planning.problem import Problem, Rules, Site, stage_sizes
from pier_proto.v1.peer_pb2 import Place

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


def posed(
    section: PipelineSection, places: Mapping[str, Place], round_trips: Mapping[str, float], seed: int
) -> tuple[Problem, Plan]:
    """The problem of sites that may hold any stage, as at the start of a run, and a valid plan.

    Args:
        places: of the sites, in the order of the problem; their stages are ignored.
        round_trips: seconds from the planner to other sites, by node id.

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
    rules = Rules(max_swaps=section.swaps, max_jump=max(len(sizes) - 1, 1))
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
