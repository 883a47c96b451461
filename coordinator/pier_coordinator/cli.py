"""The command line of pier-coordinator: all commands of a run's operator.

They operate a run and plan pipelines and domain experts. Heavy modules are imported only when a command needs them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from pier_node import __version__
from pier_node.base.errors import PierError
from pier_node.commands import options

if TYPE_CHECKING:
    from pier_coordinator.commands.paths import Policy

FOLDER = click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("."),
    help="Folder of the run, created by `init`. [default: this folder]",
)
LIMIT = click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="How many to show.")
HOURS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType[float]):
    """A duration such as 90m, 24h or 7d, converted to seconds."""

    name = "TIME"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert to seconds; fail with a message that says what is allowed."""
        if isinstance(value, float):
            return value
        number, unit = value[:-1], value[-1:]
        if unit not in HOURS or not re.fullmatch("[0-9]{1,9}", number) or not int(number):
            self.fail(f"{value!r} is not a duration: write 30m, 24h or 7d", param, ctx)
        return int(number) * HOURS[unit]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Manage a run: invite sites, watch their progress, and give them orders.

    First:  pier-coordinator init my-run && pier-coordinator start my-run

    Then:   pier-coordinator invite --data my-run --name lab-b
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@main.group()
def paths() -> None:
    """Plan pipelines across sites (SkipPipe).

    A plan has the stage of each site and the path of each microbatch.
    """


@paths.command("plan")
@click.option(
    "--problem",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="JSON file with sites, links, stages and rules; see docs/paths.md. [default: the run in --data]",
)
@FOLDER
@click.option(
    "--policy",
    type=click.Choice(["full", "skip", "random"]),
    help="full: paths run through all stages; skip: planned paths leave out some; random: random paths leave out some. "
    "[default: the run's policy; skip with --problem]",
)
@click.option("--seconds", type=options.Finite(0.1, 3600), default=10.0, show_default=True, help="Work of each search.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="The same seed gives the same plan.")
@click.option(
    "--svg",
    type=options.Picture(".svg"),
    help="Write a Gantt chart to this SVG file. [default: no file]",
)
@options.JSON
@options.explained
def plan_paths(
    file: Path | None, folder: Path, policy: str | None, seconds: float, seed: int, svg: Path | None, as_json: bool
) -> None:
    """Assign sites to stages and plan all paths.

    Prints the stages, the iteration time and its bounds. Plans for the live sites of the run in --data, from what they
    have measured, or for the sites that --problem describes. The plan is only shown and changes nothing: in a run, the
    sites plan for themselves, so they keep training if the coordinator is lost.
    """
    from pier_coordinator.commands.paths import Search, plan_file, plan_run

    how = Search(cast("Policy | None", policy), seed, seconds)
    if file:
        plan_file(file, how, as_json, svg)
    else:
        plan_run(folder, how, as_json, svg)


@main.group()
def experts() -> None:
    """Plan, train and collect domain experts."""


EXPERTS_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experts.toml"))


@experts.command("init")
@EXPERTS_FILE
@options.preset("Model of run.toml, which is size S.")
@options.FORCE
@options.explained
def init_experts(file: Path, preset: str, force: bool) -> None:
    """Write an experts.toml with all settings, meanings and defaults.

    FILE is the file to write. [default: experts.toml]
    """
    from pier_coordinator.commands.experts import init

    click.echo(init(file, preset, force))


@experts.command("plan")
@EXPERTS_FILE
@FOLDER
@click.option("--dry-run", is_flag=True, expose_value=False, help="Has no effect: `plan` never starts anything.")
@options.JSON
@options.explained
def plan_experts(file: Path, folder: Path, as_json: bool) -> None:
    """Show which site would train which expert, for how long, and why. Start nothing.

    Reads the domains of FILE, estimates where a larger model and where more steps pay off, and assigns the experts to
    the [[sites]] of FILE. Without [[sites]], assigns them to the sites that train in the run in --data.
    FILE defaults to experts.toml.
    """
    from pier_coordinator.commands.experts import plan

    plan(file, folder, as_json)


@experts.command("start")
@EXPERTS_FILE
@FOLDER
@click.option("--yes", is_flag=True, help="Start without asking. [default: show the plan and ask]")
@click.option("--dry-run", is_flag=True, help="Check and show everything, and start nothing.")
@options.JSON
@options.explained
def start_experts(file: Path, folder: Path, as_json: bool, **how: bool) -> None:
    """Show the plan for FILE, and have its experts trained.

    The sites of the run in --data train them once that run is finished. FILE defaults to experts.toml.
    """
    from pier_coordinator.commands.experts import start

    start(file, folder, as_json, **how)


@experts.command("status")
@FOLDER
@options.JSON
@options.explained
def status_experts(folder: Path, as_json: bool) -> None:
    """Show who trains which expert, its progress and its quality.

    Exit code: 0 if all experts are there, 3 if some are still missing, 1 if the coordinator does not answer.
    """
    from pier_coordinator.commands.experts import status

    sys.exit(0 if status(folder, as_json) else 3)


@experts.command("collect")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@FOLDER
@click.option(
    "--from",
    "sites",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The --data folder of a site, or a copy of it. Can be repeated. [default: none]",
)
@options.explained
def collect_experts(out: Path, folder: Path, sites: tuple[Path, ...]) -> None:
    """Copy the experts of a complete plan into the folder OUT.

    Adds ensemble.json.
    """
    from pier_coordinator.commands.experts import collect

    click.echo(collect(folder, sites, out))


SITES = click.argument("sites", nargs=-1)
PAGE = "127.0.0.1:7780"


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@options.preset("Model size.")
@options.explained
def init(folder: Path, preset: str) -> None:
    """Create a folder for a run.

    It gets a commented run.toml and the coordinator's identity.
    """
    from pier_coordinator.commands.start import init

    click.echo(init(folder, preset))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--listen", default="0.0.0.0:7790", show_default=True, metavar="HOST:PORT", help="Address to listen on.")
@click.option(
    "--advertise", metavar="HOST[:PORT]", help="Address where sites reach it. [default: detected and printed]"
)
@click.option("--page", default=PAGE, show_default=True, metavar="HOST:PORT", help="Address of the web page.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Another host name for the page, such as that of a proxy. Can be repeated. "
    "[default: IP addresses, localhost and this machine's name]",
)
@click.option(
    "--private",
    is_flag=True,
    help="Show the page only to people who have the token in viewer.token. [default: to everyone who reaches it]",
)
@click.option(
    "--public",
    metavar="HOST:PORT",
    help="Also serve a page for everyone, without actions, addresses and logs. [default: no such page]",
)
@options.QUIET
@options.LOG_JSON
@options.explained
def start(folder: Path, quiet: bool, log_json: bool, **given: Any) -> None:
    """Run the coordinator of FOLDER until Ctrl+C.

    FOLDER defaults to this folder. When the coordinator ends, the sites keep training.
    """
    from pier_coordinator.commands.start import Settings, run_coordinator
    from pier_coordinator.identity.home import Home

    run_coordinator(Settings(Home.found(folder), **given), quiet, log_json)


@main.command()
@FOLDER
@click.option("--name", default="", help="Name of the site. [default: its host name]")
@click.option(
    "--expires",
    type=Duration(),
    default="24h",
    show_default=True,
    help="How long the invite is valid, such as 90m, 24h or 7d.",
)
@click.option("--uses", type=click.IntRange(1, 10_000), default=1, show_default=True, help="How many sites can use it.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the token to this file, to be copied to the site. [default: print it]",
)
@options.JSON
@options.explained
def invite(folder: Path, name: str, expires: float, uses: int, token_file: Path | None, as_json: bool) -> None:
    """Print the command that adds a site to the run."""
    from pier_coordinator.commands.operate import invite

    invite(folder, as_json, token_file, name=name, expires_seconds=expires, uses=uses)


@main.command()
@FOLDER
@click.argument("site")
@options.JSON
@options.explained
def revoke(folder: Path, site: str, as_json: bool) -> None:
    """Remove a site from the run for good, or revoke an invite.

    SITE is the name or node id of a site, or the id of an invite. Revoking a site also revokes its invite if uses are
    left; otherwise the same people could join again. Revoking an invite does not remove the sites that joined with it:
    revoke each of them.
    """
    from pier_coordinator.commands.operate import revoke

    revoke(folder, site, as_json)


@main.command()
@FOLDER
@options.JSON
@options.explained
def nodes(folder: Path, as_json: bool) -> None:
    """Show the sites, their addresses and what they are doing.

    Exit code: 0 if no site is silent, 3 if one is, 1 if the coordinator does not answer.
    """
    from pier_coordinator.commands.operate import nodes

    sys.exit(nodes(folder, as_json))


@main.command()
@FOLDER
@options.JSON
@options.WATCH
@options.explained
def status(folder: Path, as_json: bool, watch: bool) -> None:
    """Show the progress of the run and what needs attention.

    Exit code: 0 if no site is silent, 3 if one is, 1 if the coordinator does not answer.
    """
    from pier_coordinator.commands.operate import status

    sys.exit(status(folder, as_json, watch))


@main.command()
@FOLDER
@options.JSON
@LIMIT
@options.explained
def events(folder: Path, as_json: bool, limit: int) -> None:
    """Show the latest events.

    Events are sites that joined or left, orders and warnings.
    """
    from pier_coordinator.commands.operate import events

    events(folder, as_json, limit, of_sites=False)


@main.command()
@FOLDER
@options.JSON
@LIMIT
@options.explained
def logs(folder: Path, as_json: bool, limit: int) -> None:
    """Show the latest warnings that the sites logged."""
    from pier_coordinator.commands.operate import events

    events(folder, as_json, limit, of_sites=True)


@main.command()
@FOLDER
@SITES
@options.JSON
@options.explained
def pause(folder: Path, sites: tuple[str, ...], as_json: bool) -> None:
    """Pause training at SITES before their next round. [default: all sites]"""
    from pier_coordinator.commands.operate import order

    order(folder, "pause", sites, as_json)


@main.command()
@FOLDER
@SITES
@options.JSON
@options.explained
def resume(folder: Path, sites: tuple[str, ...], as_json: bool) -> None:
    """Resume training at SITES. [default: all sites]"""
    from pier_coordinator.commands.operate import order

    order(folder, "resume", sites, as_json)


@main.command()
@FOLDER
@SITES
@options.JSON
@options.explained
def stop(folder: Path, sites: tuple[str, ...], as_json: bool) -> None:
    """Have SITES leave the run cleanly and stop. [default: all sites]

    `pier-node start` at the site resumes the run later. Stop the coordinator itself with Ctrl+C.
    """
    from pier_coordinator.commands.operate import order

    order(folder, "stop", sites, as_json)


@main.command()
@FOLDER
@click.argument("site")
@click.argument("kind", type=click.Choice(["replica", "stage"]))
@click.argument("number", type=click.IntRange(min=0), required=False)
@options.JSON
@options.explained
def assign(folder: Path, site: str, kind: str, number: int | None, as_json: bool) -> None:
    """Give SITE an assignment that applies from its next round.

    replica: train the whole model together with the others; in a pipeline, hold any stage. stage NUMBER: hold that
    stage of the pipeline, counted from 0, if the site holds none yet.
    """
    from pier_coordinator.commands.operate import act

    if (number is None) == (kind == "stage"):
        raise PierError(
            f"assign {site} {kind}: " + ("which stage?" if number is None else "a replica has no number"),
            f"pier-coordinator assign {site} " + ("stage 0" if number is None else kind),
        )
    said = kind if number is None else f"stage {number}"
    act(folder, "assign", f"{site}: {said} from its next round on", as_json, node=site, kind=kind, stage=number)


@main.command()
@click.argument("sheets", nargs=-1, type=click.Path(path_type=Path, exists=True))
@FOLDER
@click.option(
    "--domain",
    "domains",
    multiple=True,
    help="Also score this domain. Can be repeated. [default: those with an expert]",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The experts.toml that says where the text of --domain is. [default: the domain is built in]",
)
@options.ROWS
@click.option(
    "--patience",
    type=options.Finite(1, 1e7),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Skip an expert that has reported nothing for this many seconds.",
)
@options.TOP_K
@options.PLOT
@options.JSON
@options.explained
def evaluate(sheets: tuple[Path, ...], top_k: int, plot: Path | None, as_json: bool, **asked: Any) -> None:
    """Have the sites score their experts, and compare the mixtures. No model leaves its site.

    Waits for the sites of the run in --data, which finish training first. With SHEETS, asks no site: they are files
    that `pier-node score --save` wrote at the sites, or folders of such files.

    Exit code: 0 if nothing is missing, 3 if an expert or a domain is missing.
    """
    from pier_coordinator.commands.evaluate import Asked, evaluate, evaluate_run

    if sheets:
        evaluate(sheets, top_k, plot, as_json)
    elif not evaluate_run(Asked(**asked), top_k, plot, as_json):
        sys.exit(3)
