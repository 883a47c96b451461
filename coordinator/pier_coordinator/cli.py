"""The command line of pier-coordinator: all commands of a run's operator.

They operate a run and plan pipelines and domain experts. Heavy modules are imported only when a command needs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from pier_coordinator.commands.options import FOLDER, Duration
from pier_node import __version__
from pier_node.base.errors import PierError
from pier_node.commands.options import FORCE, JSON, PLOT, explained, preset

if TYPE_CHECKING:
    from pier_node.pipeline.planning.policies import Policy


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


SITES = click.argument("sites", nargs=-1)
PAGE = "127.0.0.1:7780"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Watch over a run: invite its sites, see how they do, tell them what to do.

    First:  pier-coordinator init my-run && pier-coordinator start my-run

    Then:   pier-coordinator invite --data my-run --name lab-b
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@preset("Model size.")
@explained
def init(folder: Path, preset: str) -> None:
    """Make a folder for a run: its commented run.toml, and the coordinator's identity."""
    from pier_coordinator.commands.init import init

    click.echo(init(folder, preset))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--listen", default="0.0.0.0:7790", show_default=True, metavar="HOST:PORT", help="Where sites call.")
@click.option("--advertise", metavar="HOST[:PORT]", help="Where sites reach it. [default: found out, and said]")
@click.option("--page", default=PAGE, show_default=True, metavar="HOST:PORT", help="Where the web page is.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="A name of the page in browsers, as behind a proxy; repeat. [default: addresses and this machine's name]",
)
@click.option("--quiet", is_flag=True, help="Say only what is wrong. [default: say what happens]")
@explained
def start(folder: Path, listen: str, advertise: str | None, page: str, hosts: tuple[str, ...], quiet: bool) -> None:
    """Run the coordinator of FOLDER until Ctrl+C; the sites train on without it. [default: this folder]"""
    from pier_coordinator.commands.start import Settings, run_coordinator
    from pier_coordinator.identity.home import Home

    run_coordinator(Settings(Home.found(folder), listen, advertise, page, hosts), quiet)


@main.command()
@FOLDER
@click.option("--name", default="", help="What people call the site. [default: its host name]")
@click.option("--expires", type=Duration(), default="24h", show_default=True, help="For how long it can be used.")
@click.option("--uses", type=click.IntRange(1, 10_000), default=1, show_default=True, help="For so many sites.")
@JSON
@explained
def invite(folder: Path, name: str, expires: float, uses: int, as_json: bool) -> None:
    """Print the one command that brings a site into the run."""
    from pier_coordinator.commands.operate import invite

    invite(folder, as_json, name, expires, uses)


@main.command()
@FOLDER
@click.argument("site")
@JSON
@explained
def revoke(folder: Path, site: str, as_json: bool) -> None:
    """Put SITE (its name or node id) out of the run for good, or take back the invite of that id.

    With a site its invite ends, if that has uses left: otherwise the same people could come in again. Sites that have
    come in with an invite stay when the invite is taken back: revoke each of them.
    """
    from pier_coordinator.commands.operate import revoke

    revoke(folder, site, as_json)


@main.command()
@FOLDER
@JSON
@explained
def nodes(folder: Path, as_json: bool) -> None:
    """Show the sites: where they are and what they do.

    Exit code: 0, or 3 when a site is silent; 1 when there is no answer.
    """
    from pier_coordinator.commands.operate import nodes

    sys.exit(nodes(folder, as_json))


@main.command()
@FOLDER
@JSON
@click.option("--watch", is_flag=True, help="Show it anew every second until Ctrl+C. [default: once]")
@explained
def status(folder: Path, as_json: bool, watch: bool) -> None:
    """Show how the run does, and what needs somebody's attention.

    Exit code: 0, or 3 when a site is silent; 1 when there is no answer.
    """
    from pier_coordinator.commands.operate import status

    sys.exit(status(folder, as_json, watch))


@main.command()
@FOLDER
@JSON
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="The last so many.")
@explained
def events(folder: Path, as_json: bool, limit: int) -> None:
    """Show what happened: sites that came and went, orders, warnings."""
    from pier_coordinator.commands.operate import events

    events(folder, as_json, limit, of_sites=False)


@main.command()
@FOLDER
@JSON
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="The last so many.")
@explained
def logs(folder: Path, as_json: bool, limit: int) -> None:
    """Show the warnings that the sites logged."""
    from pier_coordinator.commands.operate import events

    events(folder, as_json, limit, of_sites=True)


@main.command()
@FOLDER
@SITES
@JSON
@explained
def pause(folder: Path, sites: tuple[str, ...], as_json: bool) -> None:
    """Have SITES train no further from their next round on. [default: all]"""
    from pier_coordinator.commands.operate import order

    order(folder, "pause", sites, as_json)


@main.command()
@FOLDER
@SITES
@JSON
@explained
def resume(folder: Path, sites: tuple[str, ...], as_json: bool) -> None:
    """Have SITES train on. [default: all]"""
    from pier_coordinator.commands.operate import order

    order(folder, "resume", sites, as_json)


@main.command()
@FOLDER
@SITES
@JSON
@explained
def stop(folder: Path, sites: tuple[str, ...], as_json: bool) -> None:
    """Have SITES leave the run politely, and end. [default: all]

    `pier-node start` at the site goes on later. The coordinator itself ends with Ctrl+C.
    """
    from pier_coordinator.commands.operate import order

    order(folder, "stop", sites, as_json)


@main.command()
@FOLDER
@click.argument("site")
@click.argument("kind", type=click.Choice(["replica", "stage"]))
@click.argument("number", type=click.IntRange(min=0), required=False)
@JSON
@explained
def assign(folder: Path, site: str, kind: str, number: int | None, as_json: bool) -> None:
    """Give SITE an assignment, taken up at its next round.

    replica: the whole model together with the others, in a pipeline any stage. stage NUMBER: that stage of a pipeline,
    counted from 0, if the site holds none yet.
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
@click.option("--domain", "domains", multiple=True, help="Score this one too; repeat. [default: those with an expert]")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="experts.toml: where the text of --domain is. [default: it is built in]",
)
@click.option("--rows", type=click.IntRange(0), default=0, help="Of each domain and split. [default: all]")
@click.option(
    "--patience",
    type=click.FloatRange(1, 1e7),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up an expert of which nothing comes for so long.",
)
@click.option(
    "--top-k", type=click.IntRange(0), default=0, help="Experts that a mixture chooses. [default: one, and two]"
)
@PLOT
@JSON
@explained
def evaluate(sheets: tuple[Path, ...], top_k: int, plot: Path | None, as_json: bool, **asked: Any) -> None:
    """Have the sites score their experts, and compare the mixtures; no model leaves its site.

    Waits for the sites of the run of --data, which train to the end first. With SHEETS nobody is asked: they are what
    `pier-node score --save` wrote at the sites, or folders of that.

    Exit code: 0, or 3 when an expert or a domain is missing.
    """
    from pier_coordinator.commands.evaluate import Asked, evaluate, evaluate_run

    if sheets:
        evaluate(sheets, top_k, plot, as_json)
    elif not evaluate_run(Asked(**asked), top_k, plot, as_json):
        sys.exit(3)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--speed", type=click.FloatRange(0), default=0.0, help="Times as fast as it was. [default: all at once]")
@click.option("--port", type=click.IntRange(0, 65535), default=7780, show_default=True, help="Of the page, here.")
@explained
def replay(file: Path, speed: float, port: int) -> None:
    """Show the page of an event log, FILE (events.jsonl in the folder of a run), again."""
    from pier_coordinator.commands.replay import run_replay

    run_replay(file, speed, port)


main.add_command(paths)
main.add_command(experts)
