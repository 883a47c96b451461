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
from pier_node.commands import options


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Train one language model across sites that share nothing but the internet.

    First site:   pier-node init --sites 2 && pier-node start

    Other sites:  the command that the first one prints
    """
    # Pier reports in words for people what gRPC's core would print on the terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    spin_little()


@main.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of a single model in Hugging Face's format, for example one that `pier-node export` wrote. "
    "[default: the ensemble in --experts]",
)
@click.option(
    "--experts",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the ensemble: ensemble.json and one folder per expert. [default: ensemble]",
)
@click.option(
    "--listen", default="127.0.0.1:7720", show_default=True, metavar="HOST:PORT", help="Address to listen on."
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    help="How many experts, the likeliest ones, answer a request. [default: all]",
)
@click.option(
    "--memory",
    type=options.Finite(0),
    default=0.0,
    metavar="GB",
    help="Memory for weights, in GB. If it is full, the least recently used expert is unloaded. [default: no limit]",
)
@click.option(
    "--posterior",
    type=click.Choice(["decay", "fixed-share", "bayes", "uniform"]),
    default="decay",
    show_default=True,
    help="How the weights of the experts adapt to the text.",
)
@options.DEVICE
@options.QUIET
@options.explained
def serve(quiet: bool, **given: Any) -> None:
    """Serve a model, or an ensemble of experts, over HTTP.

    Clients of OpenAI's protocol (/v1/completions, /v1/chat/completions) work unchanged. The page at / takes prompts.
    Press Ctrl+C to stop.
    """
    from pier_node.commands.serve import ServeOptions, run_server

    run_server(ServeOptions(**given), quiet)


DOMAINS_FILE = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The experts.toml that says where the text of the domains is. [default: the domains are built in]",
)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@DOMAINS_FILE
@click.option(
    "--domain",
    "domains",
    multiple=True,
    help="Also score this domain. Can be repeated. [default: only domains that have an expert]",
)
@options.ROWS
@options.TOP_K
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the score sheets to this folder. [default: do not write them]",
)
@options.PLOT
@options.DEVICE
@options.JSON
@options.explained
def score(as_json: bool, **given: Any) -> None:
    """Score the ensemble in FOLDER on held-out text of every domain.

    Prints bits per byte and perplexity for every mixture. With --save, FOLDER may also hold a single expert.
    """
    from pier_node.commands.ensemble import ScoreOptions, score

    score(ScoreOptions(**given), as_json)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@DOMAINS_FILE
@click.option(
    "--without", multiple=True, metavar="EXPERT", help="Leave this expert out. Can be repeated. [default: none]"
)
@click.option(
    "--active", type=click.IntRange(1), default=2, show_default=True, help="Experts that compute for a token."
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=300,
    show_default=True,
    help="Steps of training after the merge, of one window of each domain.",
)
@click.option(
    "--lr", type=options.Finite(0, min_open=True), help="Learning rate. [default: 0.001; with --routers-only 0.01]"
)
@click.option("--routers-only", is_flag=True, help="Train only the routers. [default: all weights]")
@click.option(
    "--rows", type=click.IntRange(0), default=200, show_default=True, help="Rows per domain to score. 0: all."
)
@options.DEVICE
@click.option("--force", is_flag=True, help="Replace a model in OUT even if Pier did not write it. [default: refuse]")
@options.explained
def merge(**given: Any) -> None:
    """Merge the experts of the ensemble in FOLDER into one model, OUT.

    The experts must have the same shape. OUT is a Mixtral, which transformers loads. FOLDER may also be a merged model,
    which --without makes smaller.
    """
    from pier_node.commands.merge import MergeOptions, merge

    merge(MergeOptions(**given))


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("run.toml"))
@click.option("--sites", type=click.IntRange(min=1), help="Number of sites to wait for. [default: 1, or --stages]")
@options.preset("Model size.")
@options.from_model(
    "Train the model in this folder, or of this name on the Hugging Face hub: Llama and GPT-2 by Pier's own decoder, "
    "any other causal language model by the package transformers. [default: a new one]"
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Inner steps of the whole run. [default: 1000, or what is usual for the preset]",
)
@click.option(
    "--pace",
    type=(options.Finite(min=0, min_open=True), options.Finite(min=0, min_open=True)),
    metavar="MBIT SECONDS",
    help="Mbit/s of the slowest site's link, and seconds of an inner step: chooses how updates travel, and predicts "
    "how long the run takes. [default: uncompressed]",
)
@click.option(
    "--rtt",
    type=options.Finite(min=0),
    metavar="MS",
    help="With --pace: milliseconds of a round trip between the sites that are furthest apart. [default: 100]",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "muon"]),
    help="Optimizer of inner steps; Muon had the lower loss with small models. [default: adamw]",
)
@click.option(
    "--stages",
    type=click.IntRange(min=2, max=64),
    help="Stages of a pipeline; each site holds one. [default: no pipeline, every site has the whole model]",
)
@options.FORCE
@options.explained
def init(
    file: Path, force: bool, pace: tuple[float, float] | None, rtt: float | None, sites: int | None, **model: Any
) -> None:
    """Write a run.toml with all settings, meanings and defaults.

    FILE is the file to write. [default: run.toml]
    """
    from pier_node.commands.init import RTT, Pace, Wanted, init

    if rtt is not None and pace is None:
        raise click.UsageError("--rtt is part of a prediction. Give --pace, too, or leave it out.")
    run = {"sites": sites} if sites else {}
    given = {key: value for key, value in model.items() if value is not None}
    click.echo(
        init(file, Wanted(**given, run=run, pace=Pace(*pace, RTT if rtt is None else rtt) if pace else None), force)
    )


@main.command()
@options.RUN
@options.PEERS
@click.option(
    "--coordinator",
    metavar="HOST[:PORT]",
    callback=lambda _context, _option, text: text and with_port(text, COORDINATOR_PORT),
    help="Coordinator of the run to join; the token is its invite. [default: the one stored in --data; port 7790]",
)
@options.with_token
@options.FOLDER
@click.option("--name", default="", help="Name of this site. [default: host name]")
@click.option(
    "--trust",
    default="",
    metavar="FINGERPRINT",
    help="Fingerprint of a committed state, as `pier-node status` prints it at a site that you trust. A new site "
    "accepts only states that follow from it. [default: trust the founder, whom the token names, or the coordinator]",
)
@options.LISTEN
@options.ADVERTISE
@click.option("--dataset", "data", help=options.dataset("as stored in --data, or this site's part of data.path"))
@click.option(
    "--shared-data",
    is_flag=True,
    help="Every site has a copy of --dataset: train only on this site's part. [default: as stored in --data, or "
    "--dataset belongs to this site alone, and all of it is used]",
)
@click.option(
    "--exec",
    "command",
    default="",
    metavar="COMMAND",
    help="Train with this program, which calls pier.join. Pier starts it, watches it and restarts it. "
    "[default: Pier's own trainer]",
)
@options.from_model(
    "Found the run with the weights of the model in this folder, or of this name on the Hugging Face hub. "
    "[default: random weights, from the run's seed]"
)
@click.option("--program-socket", type=click.Path(path_type=Path), hidden=True)
@options.with_parallel
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Rounds between two checkpoints. With more, a site writes less, and resumes with older optimizer moments "
    "after a crash or a stop.",
)
@click.option(
    "--http", type=click.IntRange(0, 65535), default=0, help="Status port on 127.0.0.1. [default: any free port]"
)
@options.TRANSPORT
@options.INSECURE
@options.QUIET
@options.LOG_JSON
@click.option("--fail-at", default="", hidden=True)
@options.explained
def start(peers: tuple[str, ...], quiet: bool, log_json: bool, **given: Any) -> None:
    """Found a run, join one, or resume one.

    --run founds a run. --peers or --coordinator joins one. Without these options, the run in --data resumes, or,
    without --data, the one of run.toml here begins. Ctrl+C leaves the run cleanly; the same command resumes it later.
    """
    from pier_node.trainer.early_start import start_early

    own = not (given["command"] or given["program_socket"])
    early = start_early(given["folder"], given["workers"]) if own else None  # before much is imported
    from pier_node.commands.daemon import run_site
    from pier_node.site.settings import Settings

    run_site(Settings(peers=peers, early=early, **given), quiet, log_json)


@main.command()
@options.FOLDER
@options.JSON
@options.WATCH
@options.explained
def status(folder: Path, as_json: bool, watch: bool) -> None:
    """Show what a site on this machine and its peers are doing.

    Exit code: 0 if the site's daemon is running, 3 if not.
    """
    from pier_node.commands.daemon import status

    sys.exit(status(folder, as_json, watch))


@main.command()
@options.FOLDER
@click.option(
    "--timeout", type=options.Finite(0), default=30.0, show_default=True, help="Seconds to wait for it to stop."
)
@options.explained
def stop(folder: Path, timeout: float) -> None:
    """Make a site on this machine leave its run cleanly.

    `pier-node start` resumes the run later.
    """
    from pier_node.commands.daemon import stop

    click.echo(stop(folder, timeout))


@main.command()
@options.RUN
@options.PEERS
@options.with_token
@options.FOLDER
@options.LISTEN
@options.ADVERTISE
@options.with_parallel
@options.TRANSPORT
@options.INSECURE
@options.JSON
@options.explained
def doctor(peers: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Find what keeps this site from training, and how to fix it.

    Give it the options that you would give to start. Works whether or not the daemon is running. Measures the link to
    every site of the run, which takes a few seconds and up to 45 MB per site.

    Exit code: 0 if nothing is wrong, 1 if something is.
    """
    from pier_node.doctor.examination import doctor
    from pier_node.site.join import with_run_here
    from pier_node.site.settings import Settings

    sys.exit(doctor(with_run_here(Settings(peers=peers, **given)), as_json))


@main.command()
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--run",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=Path("run.toml"),
    show_default=True,
    help="The run.toml whose [data] names the text and the tokenizer.",
)
@click.option("--dataset", help="Text to use instead of data.path of run.toml. [default: that of run.toml]")
@click.option(
    "--processes", type=click.IntRange(0), default=0, help="Number of processes. [default: one for every two cores]"
)
@options.explained
def tokenize(run: Path, out: Path, dataset: str | None, processes: int) -> None:
    """Tokenize the data of a run.

    Writes the folder OUT, which can be copied to all sites; a site reads only its own part of it. After an
    interruption, the same command continues. Without this command, each site tokenizes its part of the text when it
    starts.
    """
    from pier_node.commands.tokenize import tokenize_run

    for message in tokenize_run(run, out, dataset, processes):
        click.echo(message)


@main.command()
@options.FOLDER
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Replace the model in OUT even if Pier did not write it. [default: refuse]")
@click.option("--gguf", is_flag=True, help="Also write OUT/model.gguf, for llama.cpp. [default: no]")
@options.explained
def export(folder: Path, out: Path, force: bool, gguf: bool) -> None:
    """Export the newest checkpoint for Hugging Face's libraries.

    OUT is the folder to create, or an earlier export to replace. The daemon may keep running.
    """
    from pier_node.commands.model import export

    click.echo(export(folder, out, force, gguf))


@main.command()
@options.FOLDER
@options.MODEL
@click.option(
    "--batches",
    type=click.IntRange(0),
    default=0,
    help="Number of batches to evaluate. [default: inner.eval_batches of the run]",
)
@click.option("--dataset", help=options.dataset("as stored in --data, or data.path"))
@click.option(
    "--skip",
    type=options.Finite(0, 1, max_open=True),
    help="Fraction of the stages to leave out, from 0 to below 1. [default: none]",
)
@click.option(
    "--plot",
    type=options.Picture(),
    help="With --skip: also write a plot to this file: .svg, .png or .pdf. [default: a table only]",
)
@options.DEVICE
@options.JSON
@options.explained
def evaluate(skip: float | None, plot: Path | None, **given: Any) -> None:
    """Measure a model on the validation split of a run.

    Prints the loss in nats per token, the perplexity, and bits per byte of text. With --skip, prints the perplexity
    with each choice of stages left out, and with the last stages left out.
    """
    from pier_node.commands.model import EvaluateOptions, evaluate, evaluate_omissions

    asked = EvaluateOptions(**given)
    click.echo(evaluate(asked) if skip is None else evaluate_omissions(asked, skip, plot))


@main.command()
@options.FOLDER
@options.MODEL
@click.argument("prompt")
@click.option("--tokens", type=click.IntRange(0), default=200, show_default=True, help="Number of tokens to generate.")
@click.option(
    "--temperature",
    type=options.Finite(0),
    default=0.8,
    show_default=True,
    help="0 always takes the likeliest token, 1 samples from the model's distribution, and higher values vary more.",
)
@click.option(
    "--top-k", type=click.IntRange(0), default=0, help="Sample from this many likeliest tokens. [default: all]"
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="The same seed gives the same text."
)
@options.DEVICE
@options.explained
def generate(**given: Any) -> None:
    """Continue PROMPT with a model, and stream the text."""
    from pier_node.commands.model import GenerateOptions, generate

    generate(GenerateOptions(**given), lambda text: click.echo(text, nl=False))
    click.echo()


@main.command()
@click.option(
    "--sites", type=click.IntRange(2, 8), default=3, show_default=True, help="Number of sites on this machine."
)
@click.option(
    "--algorithm",
    type=click.Choice(["pier", "diloco", "noloco", "sync"]),
    help="How sites exchange updates. [default: pier; sync with --pipeline]",
)
@click.option(
    "--transport", type=click.Choice(["grpc", "hivemind"]), default="grpc", show_default=True, help="How sites connect."
)
@click.option("--steps", type=click.IntRange(1), help="Number of inner steps. [default: as many as fit into --seconds]")
@click.option(
    "--seconds",
    type=options.Finite(min=0, min_open=True),
    default=90.0,
    show_default=True,
    help="Training time in seconds.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pier-demo"),
    show_default=True,
    help="Folder for everything: sites, logs, the model, the loss curve. Emptied first.",
)
@click.option("--keep", is_flag=True, help="Resume the run in --folder. [default: start a new run]")
@click.option(
    "--experts",
    is_flag=True,
    help="Three unequal sites train a seed model, then experts. Only --folder applies. [default: one model]",
)
@click.option(
    "--pipeline",
    is_flag=True,
    help="Six sites hold four stages of the model. [default: each site holds the whole model]",
)
@click.option("--kill-at", type=click.IntRange(1), help="With --pipeline: kill a site after this step. [default: none]")
@options.JSON
@options.explained
def demo(
    as_json: bool, experts: bool, pipeline: bool, kill_at: int | None, algorithm: str | None, **given: Any
) -> None:
    """Watch several sites on this machine train one small model.

    With --pipeline, each site holds one stage, and only --steps, --algorithm, --kill-at and --folder apply.

    Exit code: 0 on success, 1 on failure, 130 after Ctrl+C, which stops everything.
    """
    try:
        if experts:
            from pier_node.demo.experts import run_experts_demo

            run_experts_demo(given["folder"], as_json)
            return
        if pipeline:
            from pier_node.demo.pipeline import run_pipeline_demo

            well = run_pipeline_demo(given["folder"], given["steps"], kill_at, algorithm or "sync", as_json)
            sys.exit(0 if well else 1)
        from pier_node.demo.replicas import Options, run_demo

        sys.exit(0 if run_demo(Options(algorithm=algorithm or "pier", **given), as_json) else 1)
    except KeyboardInterrupt:
        click.echo("Stopped; no process is left running. Run the same command with --keep to resume.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
