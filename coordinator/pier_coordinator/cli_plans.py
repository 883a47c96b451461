"""The commands of pier-coordinator that plan: pipelines across sites, and domain experts. See cli.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from pier_coordinator.options import FOLDER
from pier_node.options import FORCE, JSON, explained, preset

if TYPE_CHECKING:
    from pier_coordinator.paths.policies import Policy


@click.group()
def paths() -> None:
    """Plan pipelines across sites (SkipPipe): which site holds which stage, and the way of every microbatch."""


@paths.command("plan")
@click.option(
    "--problem",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Sites, links, stages and rules, as JSON: docs/paths.md. [default: the run of --data]",
)
@FOLDER
@click.option(
    "--policy",
    type=click.Choice(["full", "skip", "random"]),
    help="All stages; some, on planned paths; some, on random ones. [default: as the run; skip for --problem]",
)
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True, help="For each search.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="The same seed, the same plan.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw it there. [default: not]")
@JSON
@explained
def plan_paths(
    file: Path | None, folder: Path, policy: str | None, seconds: float, seed: int, svg: Path | None, as_json: bool
) -> None:
    """Assign sites to stages and plan all paths; show the time, the bounds and a Gantt chart.

    Plans for the live sites of the run of --data, of what they have measured, or for those that --problem describes.
    It shows what could be and changes nothing: in a run the sites plan for themselves, so that a lost coordinator
    stops nobody.
    """
    from pier_coordinator.commands.paths import Search, plan_file, plan_run

    how = Search(cast("Policy | None", policy), seed, seconds)
    if file:
        plan_file(file, how, as_json, svg)
    else:
        plan_run(folder, how, as_json, svg)


@click.group()
def experts() -> None:
    """Domain experts: plan who trains which, have them trained, and collect them."""


EXPERTS_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experts.toml"))


@experts.command("init")
@EXPERTS_FILE
@preset("The model of run.toml: S.")
@FORCE
@explained
def init_experts(file: Path, preset: str, force: bool) -> None:
    """Write an experts.toml: every setting, its meaning and its default.

    FILE is what it is called. [default: experts.toml]
    """
    from pier_coordinator.commands.experts import init

    click.echo(init(file, preset, force))


@experts.command("plan")
@EXPERTS_FILE
@FOLDER
@JSON
@explained
def plan_experts(file: Path, folder: Path, as_json: bool) -> None:
    """Show who would train what, for how long, and why; start nothing.

    Reads the domains of FILE, estimates where size and where steps pay, and gives the experts to the [[sites]] of FILE,
    or if it has none, to those that train in the run of --data. FILE is experts.toml if it is not given.
    """
    from pier_coordinator.commands.experts import plan

    plan(file, folder, as_json)


@experts.command("start")
@EXPERTS_FILE
@FOLDER
@click.option("--yes", is_flag=True, help="Do not ask. [default: show the plan and ask]")
@JSON
@explained
def start_experts(file: Path, folder: Path, yes: bool, as_json: bool) -> None:
    """Show the plan of FILE, and have the sites of the run of --data train it once that run is finished.

    FILE is experts.toml if it is not given.
    """
    from pier_coordinator.commands.experts_run import start

    start(file, folder, yes, as_json)


@experts.command("status")
@FOLDER
@JSON
@explained
def status_experts(folder: Path, as_json: bool) -> None:
    """Show who trains which expert, how far it is, and how good.

    Exit code: 0, or 3 when experts are missing yet; 1 when there is no answer.
    """
    from pier_coordinator.commands.experts_run import status

    sys.exit(0 if status(folder, as_json) else 3)


@experts.command("collect")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@FOLDER
@click.option(
    "--from",
    "sites",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The --data folder of a site, or a copy of it; several times. [default: none]",
)
@explained
def collect_experts(out: Path, folder: Path, sites: tuple[Path, ...]) -> None:
    """Copy the experts into the folder OUT, with ensemble.json: the ensemble of a plan that is complete."""
    from pier_coordinator.commands.experts_run import collect

    click.echo(collect(folder, sites, out))
