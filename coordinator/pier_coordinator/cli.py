"""pier-coordinator: everything a run's operator does. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import click

from pier_node import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Watch over a run: invite its sites, see how they do, tell them what to do."""
