"""The commands of pier-node for an ensemble of experts: how good it is, and answering with it. See cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pier_node.options import DEVICE, JSON, PLOT, explained


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
