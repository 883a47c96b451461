"""How good are Pier's plans for SkipPipe, and how long do they take to find, compared with the reference's and the
best known?

    python -m bench.paths [--quick] [--json FILE] [--only NAME] [--hundred SECONDS [--network N ...]]

Every instance of paths_instances.py: the lower bound for any assignment of sites to stages; a joint search without and
with the swaps that the instance allows; one whose replicas are no further apart than in the reference's assignment; a
full pipeline placed by the same search. A search gets a tenth of what the reference's solver took, and 30 s at most, on
two threads. Makespans are without data-parallel sync, in the event simulator.

--hundred plans for 100 sites instead, and says how far above the bounds the plans are.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.paths_instances import Instance, hundred, instances
from pier_coordinator.commands.paths import full_pipeline
from pier_node.pipeline.planning.bounds import lower_bounds
from pier_node.pipeline.planning.plan import random_plan, violations, worst_intra
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.search import search
from pier_node.pipeline.planning.simulator import makespan

LONGEST = 27.0
"""Seconds asked for, so that 30 are not exceeded."""
QUICK = 0.01


@dataclass(frozen=True)
class Search:
    """What a search found, and took."""

    makespan_s: float
    worst_intra_s: float
    simulated: int
    wall_s: float
    cpu_s: float
    wrong: list[str]


@dataclass(frozen=True)
class Result:
    """Of an instance; seconds."""

    name: str
    bound_s: float
    known_s: float
    known_in_waves_s: float
    reference_s: float | None
    reference_full_s: float
    reference_solver_s: float
    asked_s: float
    in_order: Search
    swaps: Search
    capped: Search
    full: Search

    @property
    def best_s(self) -> float:
        """The better of both joint searches."""
        return min(self.in_order.makespan_s, self.swaps.makespan_s)


def measure(it: Instance, seed: int, quick: bool) -> Result:
    """All searches on an instance."""
    asked = QUICK if quick else min(LONGEST, 0.1 * it.solver_s)
    capped = replace(it.in_order, max_intra_s=it.cap_s)
    problems = {"in_order": it.in_order, "swaps": it.problem, "capped": capped, "full": full_pipeline(it.problem)}
    return Result(
        name=it.name,
        bound_s=lower_bounds(it.problem).best_s,
        known_s=it.best_s,
        known_in_waves_s=min(it.known[form]["makespan_s"] for form in ("joint", "fixed_assignment")),
        reference_s=it.reference["makespan_s"]["collision_aware"],
        reference_full_s=it.reference["makespan_s"]["full_pipeline"],
        reference_solver_s=it.solver_s,
        asked_s=asked,
        **{name: one(problem, seed, asked) for name, problem in problems.items()},
    )


def one(problem: Problem, seed: int, asked: float) -> Search:
    """A search to its end, however busy the machine is."""
    began = time.process_time()
    found = search(problem, seed, asked, deadline=math.inf)
    took = time.process_time() - began
    apart = worst_intra(problem.transfer_s, found.plan)
    return Search(found.makespan_s, apart, found.simulated, found.seconds, took, violations(problem, found.plan))


def table(results: list[Result]) -> Table:
    """A row for each instance."""
    shown = Table(title="Makespan, s", title_justify="left", box=None)
    for name in ("instance", "bound", "in order", "swaps", "capped", "known", "reference", "full", "its", "s", "its s"):
        shown.add_column(name, justify="left" if name == "instance" else "right")
    for it in results:
        ours = [f"{one.makespan_s:.3f}" for one in (it.in_order, it.swaps, it.capped)]
        theirs = "none" if it.reference_s is None else f"{it.reference_s:.2f}"
        full = [f"{it.full.makespan_s:.1f}", f"{it.reference_full_s:.1f}"]
        took = [f"{max(it.in_order.wall_s, it.swaps.wall_s):.1f}", f"{it.reference_solver_s:.0f}"]
        shown.add_row(it.name, f"{it.bound_s:.2f}", *ours, f"{it.known_s:.3f}", theirs, *full, *took)
    return shown


def far(seconds: float, seed: int, networks: Sequence[int]) -> Table:
    """Plans for 100 sites, of networks whose sites are in regions, and of as many where no site is near another."""
    shown = Table(title="100 sites, s", title_justify="left", box=None)
    for name in (
        "network",
        "random",
        "found",
        "bound, its stages",
        "bound, any stages",
        "gap",
        "plans",
        "cpu s",
        "wall s",
    ):
        shown.add_column(name, justify="left" if name == "network" else "right")
    for name, regions in (("regions", True), ("anywhere", False)):
        for number in networks:
            it = hundred(number, regions)
            began = time.process_time()
            found = search(it, seed, seconds, deadline=math.inf)
            took = time.process_time() - began
            own, bound = lower_bounds(it, found.plan).best_s, lower_bounds(it).best_s
            first, gap = makespan(it, random_plan(it, seed)), found.makespan_s / bound - 1
            times = [f"{value:.2f}" for value in (first, found.makespan_s, own, bound)]
            shown.add_row(
                f"{name} {number}", *times, f"{gap:.0%}", f"{found.simulated:,}", f"{took:.1f}", f"{found.seconds:.1f}"
            )
    return shown


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Next to no search: seconds, and no evidence.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--only", multiple=True, help="The instance of this name; may be repeated.")
@click.option("--seed", default=1, show_default=True, help="Of the searches.")
@click.option("--hundred", "seconds", type=float, help="100 sites, with this many seconds for a search.")
@click.option("--network", "networks", multiple=True, default=(1, 2, 3), help="Of 100 sites; may be repeated.")
def main(
    quick: bool,
    json_file: Path | None,
    only: tuple[str, ...],
    seed: int,
    seconds: float | None,
    networks: tuple[int, ...],
) -> None:
    """Plan all, and print the table."""
    console, results = Console(), []
    compiling = one(instances()[0].in_order, seed, QUICK)
    if seconds is not None:
        console.print(far(seconds, seed, networks))
        return
    with console.status(f"compiled in {compiling.cpu_s:.0f} s"):
        for it in instances():
            if not only or it.name in only:
                results.append(measure(it, seed, quick))
                console.print(f"{it.name}: {results[-1].best_s:.3f} s, best known {it.best_s:.3f} s", highlight=False)
    console.print(table(results))
    if json_file:
        body = {"seed": seed, "compile_s": compiling.cpu_s, "results": [asdict(it) for it in results]}
        json_file.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
