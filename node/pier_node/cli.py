"""The `pier-node` command: everything that the operator of a site does.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from pier_node import __version__
from pier_node.base.address import COORDINATOR_PORT, with_port
from pier_node.base.processes import spin_little
from pier_node.commands.options import (
    ADVERTISE,
    DEVICE,
    FOLDER,
    FORCE,
    INSECURE,
    JSON,
    LISTEN,
    MODEL,
    PEERS,
    PLOT,
    RUN,
    TRANSPORT,
    dataset,
    explained,
    preset,
    with_token,
)


@click.command()
@click.option(
    "--experts",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("ensemble"),
    show_default=True,
    help="Folder of an ensemble: ensemble.json, and a folder for each expert.",
)
@click.option("--listen", default="127.0.0.1:7720", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option(
    "--top-k", type=click.IntRange(0), default=0, help="Experts that answer a request: the likeliest. [default: all]"
)
@click.option(
    "--memory",
    type=click.FloatRange(0),
    default=0.0,
    metavar="GB",
    help="For weights; the least recently asked expert makes room. [default: no limit]",
)
@click.option(
    "--posterior",
    type=click.Choice(["decay", "fixed-share", "bayes", "uniform"]),
    default="decay",
    show_default=True,
    help="How the experts' weights follow the text.",
)
@DEVICE
@click.option("--quiet", is_flag=True, help="Say only what is wrong. [default: say what happens]")
@explained
def serve(quiet: bool, **options: Any) -> None:
    """Answer requests with an ensemble of experts, over HTTP.

    Clients of the completions protocol (/v1/completions) work as they are; / is a page to type into. Ctrl+C ends it.
    """
    from pier_node.commands.serve import Settings, run_server

    run_server(Settings(**options), quiet)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="experts.toml: where the text of the domains is. [default: they are built in]",
)
@click.option(
    "--domain", "domains", multiple=True, help="Score this one too; repeat. [default: those that have an expert]"
)
@click.option("--rows", type=click.IntRange(0), default=0, help="Of each domain and split. [default: all]")
@click.option(
    "--top-k", type=click.IntRange(0), default=0, help="Experts that a mixture chooses. [default: one, and two]"
)
@click.option(
    "--save", type=click.Path(path_type=Path, file_okay=False), help="Put the score sheets there. [default: nowhere]"
)
@PLOT
@DEVICE
@JSON
@explained
def score(as_json: bool, **options: Any) -> None:
    """Score the ensemble in FOLDER on what is held out of every domain.

    Prints bits per byte and perplexity for every mixture. FOLDER may be one expert's, with --save.
    """
    from pier_node.commands.score import Settings, score

    score(Settings(**options), as_json)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Train one language model across sites that share nothing but the internet.

    First site:   pier-node init && pier-node start --run run.toml

    Other sites:  the command that the first one prints
    """
    # Pier reports in words for people what gRPC's core would print on the terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    spin_little()


main.add_command(score)
main.add_command(serve)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("run.toml"))
@preset("Model size.")
@click.option(
    "--from",
    "weights",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Train the model in this folder, a Llama or GPT-2 in Hugging Face's format. [default: a new one]",
)
@FORCE
@explained
def init(file: Path, preset: str, weights: Path | None, force: bool) -> None:
    """Write a run.toml: every setting, its meaning and its default.

    FILE is what it is called. [default: run.toml]
    """
    from pier_node.commands.init import init

    click.echo(init(file, preset, force, weights=weights))


@main.command()
@RUN
@PEERS
@click.option(
    "--coordinator",
    metavar="HOST[:PORT]",
    callback=lambda _context, _option, text: text and with_port(text, COORDINATOR_PORT),
    help="Its invite is the token. [default: the one that --data knows; port 7790]",
)
@with_token
@FOLDER
@click.option("--name", default="", help="What people call this site. [default: host name]")
@click.option(
    "--trust",
    default="",
    metavar="FINGERPRINT",
    help="Of a committed state, as `pier-node status` shows it at a site that you trust: a newcomer takes only states "
    "that follow from it. [default: the run's founder, whom the token names, or the coordinator]",
)
@LISTEN
@ADVERTISE
@click.option("--dataset", "data", help=dataset("as --data knows, or this site's part of data.path"))
@click.option(
    "--shared-data",
    is_flag=True,
    help="--dataset is a copy of the data that every site has: train on this site's part. [default: as --data knows, "
    "or it is this site's own, and all of it is used]",
)
@click.option(
    "--exec",
    "command",
    default="",
    metavar="COMMAND",
    help="Train with this program, which calls pier.join, instead of Pier's own trainer: it is started, watched and "
    "started again. [default: Pier's own trainer]",
)
@click.option(
    "--from",
    "weights",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Found the run from the weights in this folder, in Hugging Face's format. [default: from the run's seed]",
)
@click.option("--program-socket", type=click.Path(path_type=Path), hidden=True)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes that train. [default: one for each GPU]")
@click.option(
    "--http", type=click.IntRange(0, 65535), default=0, help="Status port on 127.0.0.1. [default: any free one]"
)
@TRANSPORT
@INSECURE
@click.option("--quiet", is_flag=True, help="Say only what is wrong. [default: say what happens]")
@click.option("--fail-at", default="", hidden=True)
@explained
def start(peers: tuple[str, ...], quiet: bool, **options: Any) -> None:
    """Take part in a run: found it, join it, or go on with it.

    Founds it with --run, joins it with --peers or --coordinator, goes on with the one of --data with none of them.
    Ctrl+C leaves politely; the same command goes on later.
    """
    from pier_node.commands.start import run_site
    from pier_node.site.settings import Settings

    run_site(Settings(peers=peers, **options), quiet)


@main.command()
@FOLDER
@JSON
@click.option("--watch", is_flag=True, help="Show it anew every second until Ctrl+C. [default: once]")
@explained
def status(folder: Path, as_json: bool, watch: bool) -> None:
    """Show what a site of this machine and its peers are doing.

    Exit code: 0 when its daemon runs, 3 when not.
    """
    from pier_node.commands.status import status

    sys.exit(status(folder, as_json, watch))


@main.command()
@FOLDER
@click.option(
    "--timeout", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to wait until it has ended."
)
@explained
def stop(folder: Path, timeout: float) -> None:
    """Have a site of this machine leave its run politely.

    `pier-node start` goes on later.
    """
    from pier_node.commands.stop import stop

    click.echo(stop(folder, timeout))


@main.command()
@RUN
@PEERS
@with_token
@FOLDER
@LISTEN
@ADVERTISE
@TRANSPORT
@INSECURE
@JSON
@explained
def doctor(peers: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find what keeps this site from training, and how to mend it.

    Takes the options of start, before or while the daemon runs. Measures the links to all sites of the run, which takes
    some seconds and up to 45 MB for each.

    Exit code: 0 when nothing is wrong, 1 when something is.
    """
    from pier_node.commands.doctor import doctor
    from pier_node.site.settings import Settings

    sys.exit(doctor(Settings(peers=peers, **options), as_json))


@main.command()
@FOLDER
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Replace the model in OUT even if Pier did not write it. [default: refuse]")
@explained
def export(folder: Path, out: Path, force: bool) -> None:
    """Write the newest checkpoint as Hugging Face's libraries load it.

    OUT is the folder to make, or an earlier export to replace. The daemon may run meanwhile.
    """
    from pier_node.commands.export import export

    click.echo(export(folder, out, force))


@main.command()
@FOLDER
@MODEL
@click.option(
    "--batches", type=click.IntRange(0), default=0, help="Batches to predict. [default: inner.eval_batches of the run]"
)
@click.option("--dataset", help=dataset("as --data knows, or data.path"))
@click.option(
    "--skip", type=click.FloatRange(0, 1, max_open=True), help="Leave out this part of the stages. [default: none]"
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="With --skip: draw a PNG. [default: a table only]"
)
@DEVICE
@JSON
@explained
def evaluate(folder: Path, skip: float | None, plot: Path | None, **options: Any) -> None:
    """Measure a model on the validation split of a run.

    Prints the loss in nats a token, the perplexity, and bits per byte of text. With --skip: the perplexity without each
    choice of stages, and without the last ones.
    """
    if skip is not None:
        from pier_node.commands.evaluate import evaluate_omissions

        click.echo(evaluate_omissions(folder, skip=skip, plot=plot, **options))
        return
    from pier_node.commands.evaluate import evaluate

    click.echo(evaluate(folder, **options))


@main.command()
@FOLDER
@MODEL
@click.argument("prompt")
@click.option("--tokens", type=click.IntRange(0), default=200, show_default=True, help="Tokens to make.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="0: always the likeliest token; 1: as the model says; above: wilder.",
)
@click.option(
    "--top-k", type=click.IntRange(0), default=0, help="Choose among so many likeliest tokens. [default: among all]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same text.")
@DEVICE
@explained
def generate(folder: Path, **options: Any) -> None:
    """Let a model go on from PROMPT, and print the text as it comes."""
    from pier_node.commands.generate import generate

    generate(folder, show=lambda text: click.echo(text, nl=False), **options)
    click.echo()


@main.command()
@click.option("--sites", type=click.IntRange(2, 8), default=3, show_default=True, help="Sites on this machine.")
@click.option(
    "--algorithm",
    type=click.Choice(["pier", "diloco", "noloco", "sync"]),
    help="How sites exchange. [default: pier; sync with --pipeline]",
)
@click.option(
    "--transport", type=click.Choice(["grpc", "hivemind"]), default="grpc", show_default=True, help="How sites connect."
)
@click.option("--steps", type=click.IntRange(1), help="Inner steps. [default: what fits into --seconds]")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=90.0, show_default=True, help="For the training."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pier-demo"),
    show_default=True,
    help="Where all of it lies: sites, logs, the model, the loss curve. Emptied first.",
)
@click.option("--keep", is_flag=True, help="Go on with the run in --folder. [default: begin anew]")
@click.option(
    "--experts",
    is_flag=True,
    help="Three unequal sites train a seed, then experts; only --folder counts. [default: one model]",
)
@click.option("--pipeline", is_flag=True, help="Six sites with four stages of the model. [default: the whole at each]")
@click.option("--kill-at", type=click.IntRange(1), help="With --pipeline: kill a site after this step. [default: none]")
@JSON
@explained
def demo(
    as_json: bool, experts: bool, pipeline: bool, kill_at: int | None, algorithm: str | None, **options: Any
) -> None:
    """Watch several sites on this machine train one small model.

    With --pipeline each of them holds a stage of it; only --steps, --algorithm and --folder count then.

    Exit code: 0 when all went well, 1 when not, 130 after Ctrl+C, which ends everything.
    """
    try:
        if experts:
            from pier_node.demo.experts import run_experts_demo

            run_experts_demo(options["folder"], as_json)
            return
        if pipeline:
            from pier_node.demo.pipeline import PipelineOptions, run_pipeline_demo

            chosen = PipelineOptions(options["folder"], options["steps"], kill_at, algorithm=algorithm or "sync")
            sys.exit(0 if run_pipeline_demo(chosen, as_json) else 1)
        from pier_node.demo.run import Options, run_demo

        sys.exit(0 if run_demo(Options(algorithm=algorithm or "pier", **options), as_json) else 1)
    except KeyboardInterrupt:
        click.echo("Stopped, and no process is left. The same command with --keep goes on.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
