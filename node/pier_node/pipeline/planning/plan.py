"""A plan: which site holds which stage, and the path of every microbatch; whether it is valid; and random plans.

`violations` checks the constraints of SkipPipe (arXiv 2502.19913), independent of any solver. `random_plan` is a first
plan that is valid and evenly loaded.

`random_routes` is NoLoCo's random routing (arXiv 2506.10911): permutations assign microbatches to the replicas of a
stage. Microbatches visit a stage in groups as large as its number of replicas, each group in the order of a random
permutation. Each stage and group has its own permutation; with equally many replicas everywhere, that is one
permutation per boundary between stages. If the numbers differ, or if microbatches skip stages, the visitors of each
stage are counted separately. The remaining visitors at the end of a wave go to the sites with the lowest load so far,
so the load of a stage's replicas is equal within one. The routes are a pure function of the seed, the step and the
names of the sites. Permutations are orders of hashes, as in outer/noloco.py.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.problem import Matrix, Problem, even_parts

Path = tuple[int, ...]
"""Sites in the order of a microbatch's forward, by index in the problem. The first creates it and computes its loss."""


@dataclass(frozen=True)
class Plan:
    """`stages`: the sites of each stage; `waves`: the paths of each wave's microbatches."""

    stages: tuple[tuple[int, ...], ...]
    waves: tuple[tuple[Path, ...], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all microbatches, wave by wave."""
        return tuple(path for wave in self.waves for path in wave)

    def stage_of(self) -> dict[int, int]:
        """Site -> the stage that it holds; idle sites are left out."""
        return {site: stage for stage, sites in enumerate(self.stages) for site in sites}


def worst_intra(matrix: Matrix, plan: Plan) -> float:
    """The longest distance between two sites that hold the same stage, in seconds."""
    return max((matrix[a][b] for sites in plan.stages for a in sites for b in sites if a != b), default=0.0)


def sync_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds to average gradients over the replicas of the slowest stage; 0 if syncing is not counted.

    A ring all-reduce over n sites sends 2 (n - 1) / n of the gradients over every link of the ring. The stage's slowest
    link is assumed for all links.
    """
    if not problem.gradient_s:
        return 0.0
    rings = (Plan((sites,), ()) for sites in plan.stages)
    return max(2 * (1 - 1 / len(ring.stages[0])) * worst_intra(problem.gradient_s, ring) for ring in rings)


def plan_to_dict(problem: Problem, plan: Plan) -> dict[str, Any]:
    """A plan with the names of its sites."""
    names = [site.name for site in problem.sites]
    return {
        "stages": [[names[site] for site in sites] for sites in plan.stages],
        "waves": [[[names[site] for site in path] for path in wave] for wave in plan.waves],
    }


def plan_from_dict(problem: Problem, body: dict[str, Any]) -> Plan:
    """The plan from such a dict. Raises PierError: it names a site that the problem does not have."""
    number = {site.name: index for index, site in enumerate(problem.sites)}
    try:
        stages = tuple(tuple(number[name] for name in sites) for sites in body["stages"])
        waves = tuple(tuple(tuple(number[name] for name in path) for path in wave) for wave in body["waves"])
    except (KeyError, TypeError) as error:
        raise PierError(f"this is no plan for these sites: {error}", "Plan again without it.") from error
    return Plan(stages, waves)


def violations(problem: Problem, plan: Plan) -> list[str]:
    """What is wrong with a plan, in words; [] if it is valid."""
    if wrong := [*_assignment_faults(problem, plan)]:
        return wrong
    stage_of, sizes = plan.stage_of(), [len(wave) for wave in plan.waves]
    if sizes != [*problem.wave_sizes]:
        wrong.append(f"waves of {sizes} microbatches instead of {[*problem.wave_sizes]}")
    for path in plan.paths:
        name = " > ".join(problem.sites[site].name for site in path)
        wrong += [f"path {name}: {fault}" for fault in _path_faults(problem, [stage_of[site] for site in path])]
    return [*wrong, *_load_faults(problem, plan)]


def _assignment_faults(problem: Problem, plan: Plan) -> Iterator[str]:
    held = [site for sites in plan.stages for site in sites]
    if [len(sites) for sites in plan.stages] != [*problem.stage_sizes]:
        yield f"stages of {[len(sites) for sites in plan.stages]} sites instead of {[*problem.stage_sizes]}"
    if unknown := sorted({*held} - {*range(len(problem.sites))}):
        yield f"there are no sites {unknown}"
        return
    for site, times in Counter(held).items():
        if times > 1:
            yield f"{problem.sites[site].name} holds {times} stages"
    if idle := sorted({site for path in plan.paths for site in path} - {*held}):
        yield f"paths visit sites {idle}, which hold no stage"
    cap = problem.max_intra_s
    if cap is not None and worst_intra(problem.transfer_s, plan) > cap:
        yield f"two sites of a stage are {worst_intra(problem.transfer_s, plan):g} s apart, more than {cap:g}"


def _path_faults(problem: Problem, stages: list[int]) -> Iterator[str]:
    """(1) stage 0 first, L stages, each once; (2) few and short swaps; (3) no long jumps."""
    rules = problem.rules
    if len(stages) != problem.path_length:
        yield f"{len(stages)} stages instead of {problem.path_length}"
    if stages[:1] != [0]:
        yield "does not begin at stage 0"
    if len({*stages}) < len(stages):
        yield "visits a stage twice"
    before = [max(stages[:index]) for index in range(1, len(stages))]
    swaps = [top - stage for top, stage in zip(before, stages[1:], strict=True) if stage < top]
    jumps = [stage - top for top, stage in zip(before, stages[1:], strict=True) if stage > top]
    if len(swaps) > rules.max_swaps:
        yield f"{len(swaps)} swaps, {rules.max_swaps} are allowed"
    if max(swaps, default=0) > rules.max_distance:
        yield f"a swap over {max(swaps)} stages, {rules.max_distance} are allowed"
    if sum(swaps) > rules.max_total:
        yield f"swaps over {sum(swaps)} stages together, {rules.max_total} are allowed"
    if max(jumps, default=0) > rules.max_jump:
        yield f"a jump over {max(jumps)} stages, {rules.max_jump} are allowed"


def _load_faults(problem: Problem, plan: Plan) -> Iterator[str]:
    """(4) stages after the first have equal load, within one; (5) no site has more in a wave than it can hold."""
    stage_of = plan.stage_of()
    for number, wave in enumerate(plan.waves):
        visits = Counter(site for path in wave for site in path)
        for site, times in visits.items():
            it = problem.sites[site]
            if times > it.memory:
                yield f"wave {number} visits {it.name} {times} times, it can hold {it.memory}"
        load = dict.fromkeys(range(1, problem.stages), 0)
        for site, times in visits.items():
            if stage_of[site] > 0:
                load[stage_of[site]] += times
        if max(load.values()) - min(load.values()) > 1:
            yield f"wave {number} visits the stages after the first unequally: {[*load.values()]}"


TRIES = 50
Stages = tuple[tuple[int, ...], ...]


def random_plan(problem: Problem, seed: int) -> Plan:
    """A random valid plan, except for `max_intra_s`. Raises PierError: why there is none."""
    dice = random.Random(seed)
    stages = _assignment(problem, dice)
    return Plan(stages, random_waves(problem, stages, dice))


def random_waves(problem: Problem, stages: Stages, dice: random.Random) -> tuple[tuple[Path, ...], ...]:
    """Paths for a given assignment. Raises PierError."""
    waves = []
    for size in problem.wave_sizes:
        load, orders = [0] * len(problem.sites), stage_orders(problem, size, dice)
        waves.append(tuple(tuple(_least_busy(problem, stages[it], load, dice) for it in order) for order in orders))
    return tuple(waves)


def stage_loads(problem: Problem, size: int) -> tuple[int, ...]:
    """Visits of each stage in a wave of `size` microbatches; if not all are equal, larger numbers first."""
    return (size, *even_parts(size * (problem.path_length - 1), problem.stages - 1))


def _assignment(problem: Problem, dice: random.Random) -> Stages:
    """Assign sites with most memory first, each to the stage that needs most for its remaining places."""
    need = [*stage_loads(problem, problem.wave_sizes[0])]
    room = [*problem.stage_sizes]
    stages: list[list[int]] = [[] for _ in room]
    sites = sorted(range(len(problem.sites)), key=lambda site: (-problem.sites[site].memory, dice.random()))
    for site in sites:
        open_stages = [stage for stage, places in enumerate(room) if places]
        if not open_stages:
            break
        stage = max(open_stages, key=lambda it: (need[it] / room[it], dice.random()))
        stages[stage].append(site)
        room[stage] -= 1
        need[stage] -= problem.sites[site].memory
    for stage, lacking in enumerate(need):
        if lacking > 0:
            load = stage_loads(problem, problem.wave_sizes[0])[stage]
            raise PierError(
                f"memory cannot be kept: the {problem.stage_sizes[stage]} sites of stage {stage} shall hold {load} "
                f"microbatches in a wave, and have places for {load - lacking}",
                "Use more waves or fewer microbatches, give the sites more memory, "
                "or the stage more sites (stage_sizes).",
            )
    return tuple(tuple(sites) for sites in stages)


def stage_orders(problem: Problem, size: int, dice: random.Random) -> list[list[int]]:
    """The stages of each path of a wave of `size` microbatches, ascending. Raises PierError."""
    for _ in range(TRIES):
        orders = _drawn_orders(problem, size, dice)
        if orders is not None:
            return orders
    raise PierError(
        f"equal load cannot be kept: no paths of {problem.path_length} stages visit all {problem.stages} stages "
        f"equally often with jumps of at most {problem.rules.max_jump}",
        "Allow longer jumps (rules.max_jump), or make paths longer (path_length).",
    )


def _drawn_orders(problem: Problem, size: int, dice: random.Random) -> list[list[int]] | None:
    """The stages of each path: always those with most visits left, as far as jumps allow."""
    left = [*stage_loads(problem, size)]
    later = left[1:]
    dice.shuffle(later)
    left[1:] = later
    orders = []
    for _ in range(size):
        order = fullest(left, problem.path_length, problem.rules.max_jump, dice)
        if order is None:
            return None
        for stage in order:
            left[stage] -= 1
        orders.append(order)
    return orders if not any(left) else None


def fullest(left: list[int], length: int, jump: int, dice: random.Random) -> list[int] | None:
    """The ascending stages with the largest sum of visits left; stages without visits left are not used."""
    weight = [dice.random() / len(left) + 4.0 ** min(count, 20) for count in left]
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for _ in range(length - 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for stage, (value, order) in best.items():
            for after in range(stage + 1, min(stage + jump, len(left) - 1) + 1):
                found = value + weight[after]
                if left[after] > 0 and found > longer.get(after, (0.0, []))[0]:
                    longer[after] = (found, [*order, after])
        best = longer
    return max(best.values(), default=(0.0, None))[1]


def _least_busy(problem: Problem, sites: tuple[int, ...], load: list[int], dice: random.Random) -> int:
    """The site of a stage that would finish first with one more microbatch, among those with free memory."""
    free = [site for site in sites if load[site] < problem.sites[site].memory]
    chosen = min(free, key=lambda it: ((load[it] + 1) * problem.sites[it].forward_s, dice.random()))
    load[chosen] += 1
    return chosen


def random_routes(problem: Problem, stages: Stages, seed: int, step: int) -> Plan:
    """The paths of one iteration over given stages. Raises PierError: a site cannot hold its share."""
    dice, load, waves = random.Random(_draw(seed, step)), [0] * len(problem.sites), []
    for wave, size in enumerate(problem.wave_sizes):
        turns, orders = [], stage_orders(problem, size, dice)
        for stage, sites in enumerate(stages):
            visitors = sum(stage in order for order in orders)
            _fits(problem, sites, stage, visitors)
            turns.append(iter(_dealt(problem, sites, visitors, load, f"{seed} {step} {wave} {stage}")))
        waves.append(tuple(tuple(next(turns[stage]) for stage in order) for order in orders))
    return Plan(stages, tuple(waves))


def _dealt(problem: Problem, sites: Sequence[int], visitors: int, load: list[int], draw: str) -> list[int]:
    """The site for each visitor of a stage, in order."""
    dealt: list[int] = []
    while len(dealt) < visitors:
        drawn = sorted(sites, key=lambda site: _draw(draw, len(dealt), problem.sites[site].name))
        least = {*sorted(drawn, key=lambda site: load[site])[: visitors - len(dealt)]}
        group = [site for site in drawn if site in least]
        for site in group:
            load[site] += 1
        dealt += group
    return dealt


def _fits(problem: Problem, sites: Sequence[int], stage: int, visitors: int) -> None:
    most = -(-visitors // len(sites))
    small = [it.name for it in (problem.sites[site] for site in sites) if it.memory < most]
    if small:
        raise PierError(
            f"memory cannot be kept: random paths bring {most} microbatches of a wave to each site of stage {stage}, "
            f"more than {', '.join(small)} can hold",
            "Use more waves, give the sites more memory, or plan the paths (skip instead of random).",
        )


def _draw(*key: object) -> bytes:
    return hashlib.sha256(" ".join(map(str, key)).encode()).digest()
