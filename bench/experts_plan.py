"""How close to optimal is a plan for experts, and how fast is it found? LPT alone, local search, and the exact solver.

    python -m bench.experts_plan [--seeds 10] [--seconds 8]

Experts of the paper's three sizes and step counts, drawn at random, on sites of 20 to 120 TFLOP/s. The gap is to the
planner's final lower bound, which the best schedule need not reach.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import mean

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from pier_coordinator.experts.scheduling import Limits, Places, Problem, improved, longest_first, makespan, schedule

SIZES = ((9, 3), (21, 5), (64, 16))
"""Experts, sites."""
WORK = [flops * steps * 688_128 for flops in (1.255e9, 1.383e9, 1.510e9) for steps in (300, 400, 500)]


@dataclass(frozen=True)
class Run:
    """One way on one instance: seconds until the last site is done, and until that was known."""

    method: str
    makespan: float
    seconds: float


def instance(experts: int, sites: int, seed: int) -> Problem:
    """Drawn at random."""
    random = np.random.default_rng(seed)
    return Problem.uniform(random.choice(WORK, experts).tolist(), (random.uniform(20, 120, sites) * 1e12).tolist())


def compared(problem: Problem, limits: Limits) -> tuple[list[Run], float]:
    """The three ways, and the best lower bound, seconds."""
    runs, began = [], time.perf_counter()

    def took(method: str, places: Places) -> None:
        runs.append(Run(method, makespan(problem, places), time.perf_counter() - began))

    quick = longest_first(problem)
    assert quick is not None
    took("LPT", quick)
    took("LPT + local search", improved(problem, quick))
    began = time.perf_counter()
    found = schedule(problem, limits)
    took("planner", found.places)
    return runs, found.bound


@click.command()
@click.option("--seeds", type=int, default=10, show_default=True, help="Instances of each size.")
@click.option("--seconds", type=float, default=8.0, show_default=True, help="For each plan.")
def cli(seeds: int, seconds: float) -> None:
    """Plan instances drawn at random in three ways, and print how near to the best they come."""
    table = Table("experts", "sites", "method", "gap, mean", "gap, worst", "s, mean", "s, worst", box=None)
    for experts, sites in SIZES:
        found = [compared(instance(experts, sites, seed), Limits(seconds)) for seed in range(seeds)]
        for number, first in enumerate(found[0][0]):
            gaps = [runs[number].makespan / bound - 1 for runs, bound in found]
            took = [runs[number].seconds for runs, _ in found]
            shown = [f"{100 * gap:.1f} %" for gap in (mean(gaps), max(gaps))]
            table.add_row(str(experts), str(sites), first.method, *shown, f"{mean(took):.3f}", f"{max(took):.2f}")
    Console().print(table)


if __name__ == "__main__":
    cli()
