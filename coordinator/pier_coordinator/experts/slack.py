"""Stage C: fills the time of each site, so that no site idles before a given time.

What a site can do until then goes to those of its experts where the last FLOP gains most: Stage A's water-filling, site
by site. Starting from a plan's steps, the result gives extra steps; starting from few steps, it is a plan that leaves
no site idle. This stage goes beyond HDEE (arXiv 2502.19385).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pier_coordinator.experts.allocation import filled
from pier_coordinator.experts.curves import Curves
from pier_coordinator.experts.jobs import Job, jobs
from pier_coordinator.experts.problem import Places
from pier_coordinator.experts.recipe import Recipe, Steps, whole
from pier_coordinator.experts.task import Site, Task


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
