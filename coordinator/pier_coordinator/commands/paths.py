"""`pier-coordinator paths plan`: plans a pipeline, and says what is to be expected of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from pier_coordinator.commands.paths_run import Measured, of_run
from pier_coordinator.paths.form import plan_to_dict, problem_from_json
from pier_coordinator.paths.gantt_svg import gantt_svg
from pier_coordinator.paths.gantt_text import gantt_text
from pier_coordinator.paths.planning import Outcome, plan_paths
from pier_coordinator.paths.policies import Policy
from pier_coordinator.paths.problem import Problem
from pier_node.units import UNKNOWN, percent, several

BESIDE_CHART = 40
"""Columns that the chart leaves to the names of sites and their utilisation."""


@dataclass(frozen=True)
class Search:
    """How to plan; `policy` None: as the run does, skipping for what a file describes. `seconds`: of each search."""

    policy: Policy | None
    seed: int
    seconds: float


def plan_file(file: Path, how: Search, as_json: bool, svg: Path | None) -> None:
    """Plan what a file describes, and show it. Raises PierError."""
    _plan(problem_from_json(file.read_bytes()), how.policy or "skip", how, as_json, svg, None)


def plan_run(folder: Path, how: Search, as_json: bool, svg: Path | None) -> None:
    """Plan for the sites of a run, of what they have measured, and show it; the run goes on as it is.

    Raises PierError.
    """
    problem, policy, measured = of_run(folder, how.policy, how.seed)
    _plan(problem, policy, how, as_json, svg, measured)


def _plan(
    problem: Problem, policy: Policy, how: Search, as_json: bool, svg: Path | None, measured: Measured | None
) -> None:
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[best]}")
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        bar = progress.add_task("compiling", total=1.0, best="")

        def told(what: str, part: float, best_s: float) -> None:
            progress.update(bar, description=what, completed=part, best=f"best so far {best_s:.2f} s")

        outcome = plan_paths(problem, policy, how.seed, how.seconds, told)
    if svg:
        svg.write_text(gantt_svg(outcome.problem, outcome.found.plan, outcome.schedule, _title(outcome)))
    if as_json:
        print(json.dumps(as_dict(outcome) | ({"measured": asdict(measured)} if measured else {})))
        return
    if measured:
        console.print(measured.view(), "")
    console.print(_title(outcome), style="bold", highlight=False)
    console.print(summary(outcome, measured.now_s if measured else None), "")
    width = max(console.width - BESIDE_CHART, 20)
    console.print(gantt_text(outcome.problem, outcome.found.plan, outcome.schedule, width))


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome for scripts; times in seconds, utilisation by site."""
    found, full, problem = outcome.found, outcome.full, outcome.problem
    names = [site.name for site in problem.sites]
    return {
        "policy": outcome.policy,
        "makespan_s": found.makespan_s,
        "sync_s": found.sync_s,
        "per_microbatch_s": found.iteration_s / problem.microbatches,
        "full_pipeline": {"makespan_s": full.makespan_s, "sync_s": full.sync_s, "saved": outcome.saved},
        "lower_bound_s": outcome.any_bounds.best_s,
        "lower_bound_of_assignment_s": outcome.bounds.best_s,
        "gap": outcome.gap,
        "utilisation": dict(zip(names, outcome.schedule.utilisation, strict=True)),
        "simulated": found.simulated,
        "seconds": found.seconds,
        "complete": found.complete,
        "plan": plan_to_dict(problem, found.plan),
    }


def summary(outcome: Outcome, now_s: float | None = None) -> Table:
    """The plan beside the full pipeline and the bounds, and what the run uses now, if that is known."""
    found, full, count = outcome.found, outcome.full, outcome.problem.microbatches
    table = Table(box=None, pad_edge=False)
    for name in ("", "an iteration", "a microbatch", "of the full pipeline"):
        table.add_column(name, justify="right" if name else "left")
    rows = {
        "this plan": found.iteration_s,
        "full pipeline, placed as well": full.iteration_s,
        "bound with these stages": outcome.bounds.best_s,
        "bound with any stages": outcome.any_bounds.best_s,
    }
    for name, seconds in rows.items():
        share = percent(seconds / full.iteration_s)
        table.add_row(name, f"{seconds:.2f} s", f"{seconds / count:.3f} s", share)
    if now_s:  # of the times that were known when it planned: of other full pipelines it would be another share
        table.add_row("the run's own paths, as it planned them", f"{now_s:.2f} s", f"{now_s / count:.3f} s", UNKNOWN)
    ended = "to its end" if found.complete else "to the deadline: a slower machine finds less, and not always the same"
    table.caption = f"{found.simulated:,} plans simulated in {found.seconds:.1f} s, {ended}"
    return table


def _title(outcome: Outcome) -> str:
    problem, found = outcome.problem, outcome.found
    stages = f"{problem.title} on {several(len(problem.sites), 'site')}"
    return f"{outcome.policy}: {stages}: {found.makespan_s:.2f} s, {percent(outcome.gap)} above the lower bound"
