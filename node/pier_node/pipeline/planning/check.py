"""Checks whether a plan is valid: the constraints of SkipPipe (arXiv 2502.19913), independent of any solver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pier_node.pipeline.planning.plan import Path, Plan, worst_intra
from pier_node.pipeline.planning.problem import Problem


def violations(problem: Problem, plan: Plan) -> list[str]:
    """What is wrong with a plan, in words; [] if it is valid."""
    wrong = list(_assignment(problem, plan))
    if wrong:
        return wrong
    return [*_counts(problem, plan), *_orders(problem, plan), *_loads(problem, plan)]


def _assignment(problem: Problem, plan: Plan) -> Iterator[str]:
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


def _counts(problem: Problem, plan: Plan) -> Iterator[str]:
    sizes = [len(wave) for wave in plan.waves]
    if sizes != [*problem.wave_sizes]:
        yield f"waves of {sizes} microbatches instead of {[*problem.wave_sizes]}"


def _orders(problem: Problem, plan: Plan) -> Iterator[str]:
    stage_of = plan.stage_of()
    for path in plan.paths:
        stages = [stage_of[site] for site in path]
        for wrong in _order(problem, stages):
            yield f"path {_named(problem, path)}: {wrong}"


def _order(problem: Problem, stages: list[int]) -> Iterator[str]:
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


def _loads(problem: Problem, plan: Plan) -> Iterator[str]:
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


def _named(problem: Problem, path: Path) -> str:
    return " > ".join(problem.sites[site].name for site in path)
