"""The whole plan: what each expert is, which site trains it, and how long that takes.

Stage C fills the time of each site, so that no site idles before a given time. What a site can do until then goes to
those of its experts where the last FLOP gains most: Stage A's water-filling, site by site. Starting from a plan's
steps, the result gives extra steps; starting from few steps, it is a plan that leaves no site idle. This stage goes
beyond HDEE (arXiv 2502.19385).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from pier_coordinator.experts.allocation import BudgetError, filled
from pier_coordinator.experts.difficulty import Curves, Difficulty
from pier_coordinator.experts.recipe import (
    MODES,
    Job,
    Mode,
    Recipe,
    Steps,
    fitting,
    jobs,
    judging_flops,
    problem,
    recipe,
    whole,
)
from pier_coordinator.experts.scheduling import Limits, NoPlaceError, Places, Schedule, loads, order, rated, schedule
from pier_coordinator.experts.task import MIDDLE, Site, Task
from pier_coordinator.store.experts import AcceptedPlan, AcceptedSite, Expert
from pier_node.experts.card import Size
from pier_node.experts.config import ExpertsConfig
from pier_node.experts.job import SEED, ExpertJob
from pier_node.experts.mixture import Array

EQUAL = 0.01
"""Plans whose FLOPs differ from the budget by at most this fraction can be compared."""


@dataclass(frozen=True)
class Plan:
    """The plan of a mode.

    Attributes:
        jobs: one per expert; `schedule` holds their places.
        epochs: how often each domain's text is seen, [domains].
        budget: FLOPs that should be spent.
        flops: FLOPs that are spent.
        extra: additional steps that the sites could do until the last one is done, [domains].
        loads: seconds that each site works, [sites].
        orders: indices of the jobs of each site, in the order of training.
    """

    mode: Mode
    recipe: Recipe
    jobs: list[Job]
    schedule: Schedule
    epochs: Array
    budget: float
    flops: float
    extra: Steps
    loads: Array
    orders: list[list[int]]

    def held(self, site: int) -> list[Job]:
        """The jobs of a site, in the order of training."""
        return [self.jobs[job] for job in self.orders[site]]

    def memory(self, site: int) -> float:
        """Bytes that the largest job of a site takes; 0: it has none."""
        return max((job.size.memory for job in self.held(site)), default=0.0)

    @property
    def is_equal(self) -> bool:
        """Whether it costs the budget, within EQUAL."""
        return abs(self.flops / self.budget - 1) <= EQUAL

    @property
    def idle(self) -> float:
        """The fraction of the sites' time, until the last one is done, in which they have nothing to do."""
        return 1 - float(self.loads.mean()) / self.schedule.makespan


class UnplacedError(Exception):
    """Some jobs (`jobs`) fit at no site. If `jobs` is empty, all jobs together do not fit into the sites' windows."""

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(f"no place for {', '.join(job.name for job in jobs)}")
        self.jobs = jobs


def planned(mode: Mode, task: Task, difficulty: Difficulty, sites: Sequence[Site], limits: Limits) -> Plan:
    """Make the plan of a mode. Raises BudgetError, UnplacedError."""
    budget, there = task.budget or task.homogeneous, sites
    if task.horizon:
        budget = _within(task.horizon, task, sites)
        there = [replace(site, window=math.inf) for site in sites]  # the steps are fitted to the windows afterwards
    made = recipe(mode, task, difficulty, budget, fitting(task, sites))
    experts = jobs(task, made)
    try:
        where = schedule(problem(experts, there), limits)
    except NoPlaceError as error:
        raise UnplacedError([experts[job] for job in error.jobs]) from error
    if task.horizon:
        made = _in_time(mode, task, difficulty, made, where, sites)
        experts = jobs(task, made)
        where = rated(problem(experts, sites), where.places)
    extra = np.zeros_like(made.steps)
    if not task.chain:
        full = steps_until(task, difficulty.curves, made, where.places, sites, where.makespan, made.steps)
        extra = np.maximum(full - made.steps, 0)
    placing = problem(experts, sites)
    return Plan(
        mode=mode,
        recipe=made,
        jobs=experts,
        schedule=where,
        epochs=made.steps * task.step_tokens / np.array([domain.tokens for domain in task.domains], dtype=np.float64),
        budget=budget,
        flops=float(made.flops(task).sum()),
        extra=extra,
        loads=loads(placing, where.places),
        orders=[order(placing, where.places, site) for site in range(len(sites))],
    )


def compared(
    task: Task, difficulty: Difficulty, sites: Sequence[Site], limits: Limits
) -> dict[Mode, Plan | BudgetError | UnplacedError]:
    """The plan of each mode, or why it has none; the modes share the solver's time. Chains have no `auto` mode."""
    modes = [mode for mode in MODES if not (task.chain and mode == "auto")]
    each = replace(limits, seconds=limits.seconds / len(modes))
    found: dict[Mode, Plan | BudgetError | UnplacedError] = {}
    for mode in modes:
        try:
            found[mode] = planned(mode, task, difficulty, sites, each)
        except (BudgetError, UnplacedError) as error:
            found[mode] = error
    return found


def _within(horizon: float, task: Task, sites: Sequence[Site]) -> float:
    """FLOPs of training that the sites can do until the horizon (seconds).

    Setup is counted at sites of mean speed, judging with size M.
    """
    busy = sum(min(horizon, site.window) * site.speed for site in sites)
    setup = task.setup * len(task.domains) * sum(site.speed for site in sites) / len(sites)
    return max(1.0, busy - setup - judging_flops(task.sizes[MIDDLE], task.domains))


def _in_time(
    mode: Mode, task: Task, difficulty: Difficulty, made: Recipe, where: Schedule, sites: Sequence[Site]
) -> Recipe:
    """Fit the steps so that no site idles before the horizon; in the paper's modes, so that the last site ends then."""
    if mode != "auto":
        return stretched(task, made, where.places, sites, task.horizon)
    least = np.full_like(made.steps, min(task.steps))
    steps = steps_until(task, difficulty.curves, made, where.places, sites, task.horizon, least)
    return replace(made, steps=steps)


def steps_until(
    task: Task, curves: Curves, recipe: Recipe, places: Places, sites: Sequence[Site], end: float, least: Steps
) -> Steps:
    """Steps of every domain's expert such that all sites are busy until `end`, [domains].

    Args:
        places: the site of each job; jobs are single domains, not chains.
        end: seconds; a site's window may be shorter.
        least: minimum steps, [domains]; a site that cannot even do these gets fewer.

    Returns:
        The steps, [domains]; too few to fill the time where more would repeat a text over `max_epochs` times.
    """
    steps = least.copy()
    for site, own in _at_work(task, recipe, places, sites):
        domains = [job.domains[0] for job in own]
        budget = _time(site, own, end) * site.speed
        flops = task.choice.flops[recipe.sizes[domains]]
        wanted = (least[domains] * task.step_tokens).astype(np.float64)
        low = wanted * min(1.0, budget / float((wanted * flops).sum()))
        high = np.maximum(low, task.most[domains])
        tokens = filled(task.weights[domains] * curves.data[domains], flops, curves, low, high, budget)
        steps[domains] = whole(tokens / task.step_tokens, flops * task.step_tokens, budget)
    return steps


def stretched(task: Task, recipe: Recipe, places: Places, sites: Sequence[Site], end: float) -> Recipe:
    """The recipe with all steps times one factor, such that the last site is done at `end` (seconds)."""
    work = [
        _time(site, own, end) * site.speed / sum(job.flops for job in own)
        for site, own in _at_work(task, recipe, places, sites)
    ]
    steps = np.maximum(np.floor(recipe.steps * min(work) + 1e-6), 1).astype(np.intp)
    return replace(recipe, steps=steps, scale=recipe.scale * min(work))


def _at_work(task: Task, recipe: Recipe, places: Places, sites: Sequence[Site]) -> list[tuple[Site, list[Job]]]:
    """The sites that have jobs, each with its jobs."""
    made = jobs(task, recipe)
    held = [[job for job, place in zip(made, places) if place == index] for index in range(len(sites))]
    return [(site, own) for site, own in zip(sites, held) if own]


def _time(site: Site, own: list[Job], end: float) -> float:
    """Seconds that a site has for training until `end` (seconds)."""
    return max(0.0, min(end, site.window) - sum(job.overhead(site) for job in own))


def accepted(
    config: ExpertsConfig, task: Task, plan: Plan, sites: Sequence[Site], digests: Sequence[str]
) -> AcceptedPlan:
    """Convert a plan into its stored form; jobs are numbered in the plan's order, chain by chain.

    `digests`: hashes of the domains' texts.
    """
    steps = plan.recipe.steps + (plan.extra if config.experts.fill_idle else 0)
    placed: list[Expert] = []
    names: tuple[Size, ...] = get_args(Size)
    for index, expert in enumerate(plan.jobs):
        site, after = sites[plan.schedule.places[index]], SEED
        for domain in expert.domains:
            kind = int(plan.recipe.sizes[domain])
            size = task.sizes[kind]
            flops = size.flops * int(steps[domain]) * task.step_tokens
            job = ExpertJob(
                number=len(placed),
                domain=config.domains[domain].model_copy(update={"weight": 1.0, "sites": ()}),
                domain_hash=digests[domain],
                size=names[kind],
                ffn_dim=config.sized()[kind].ffn_dim,
                steps=int(steps[domain]),
                seed=config.experts.seed,
                batch_size=config.experts.batch_size,
                lr=config.experts.lr,
                min_lr=config.experts.min_lr,
                warmup_steps=config.experts.warmup_steps,
                max_epochs=config.experts.max_epochs,
                after=after,
                flops=flops,
            )
            moved = expert.moved / len(expert.domains)
            judging = judging_flops(size, [task.domains[domain]])
            seconds = (flops + judging) / site.speed + task.setup + moved / site.line
            placed.append(
                Expert(
                    job=job,
                    site=site.name,
                    seconds=seconds,
                    memory=size.memory,
                    parameters=size.parameters,
                    judging=judging,
                    moved=moved,
                    setup=task.setup,
                    sites=tuple(sorted(expert.sites)),
                )
            )
            after = job.number
    return AcceptedPlan(
        mode=plan.mode,
        seconds=plan.schedule.makespan,
        lost_after_s=config.experts.lost_after_s,
        jobs=tuple(placed),
        sites=tuple(AcceptedSite(name=it.name, speed=it.speed, memory=it.memory, line=it.line) for it in sites),
    )
