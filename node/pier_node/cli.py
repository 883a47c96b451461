"""pier-node: everything a site's owner does. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pier_node import __version__
from pier_node.errors import PierError

FOLDER = click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pier-data"),
    show_default=True,
    help="Folder of this site: its identity, checkpoints and logs.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print a PierError as it is meant to be read, and exit with 1."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except PierError as error:
            click.secho(f"Error: {error.problem}", fg="red", err=True)
            if error.remedy:
                click.echo(error.remedy, err=True)
            sys.exit(1)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Train one language model across sites that share nothing but the internet.

    First site:   pier-node init && pier-node start --run run.toml

    Other sites:  the command that the first one prints
    """


@main.command()
@click.option("--run", type=click.Path(path_type=Path, dir_okay=False), help="run.toml of a run to found.")
@click.option("--peers", multiple=True, metavar="HOST:PORT", help="A site of the run to join; repeat or separate by commas.")
@click.option("--token", help="What the first site printed.")
@FOLDER
@click.option("--name", default="", help="What people call this site. [default: host name]")
@click.option("--listen", default="0.0.0.0:7700", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--advertise", metavar="HOST[:PORT]", help="Where others reach this site. [default: found out, and said]")
@click.option("--dataset", "data", help="Use this path instead of data.path of run.toml at this site.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes that train. [default: one for each GPU]")
@click.option("--http", type=click.IntRange(0, 65535), default=0, help="Status port on 127.0.0.1. [default: any free one]")
@click.option("--insecure", is_flag=True, help="No TLS, no token: anyone who reaches the port can take part.")
@click.option("--quiet", is_flag=True, help="Say only what is wrong.")
@click.option("--fail-at", default="", hidden=True)
@explained
def start(peers: tuple[str, ...], quiet: bool, **options: Any) -> None:
    """Take part in a run: found it (--run), join it (--peers), or go on (neither).

    Ctrl+C leaves politely; the same command goes on later.
    """
    from pier_node.join import Settings
    from pier_node.start import run_site

    listed = tuple(address for text in peers for address in text.split(",") if address)
    run_site(Settings(peers=listed, **options), quiet)
