"""`pier-node status`: what a site and its peers are doing, or what is on the disk of a site that does not run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live

from pier_node.commands.on_disk import on_disk
from pier_node.commands.running import Running, Status, find_daemon
from pier_node.commands.status_tables import disk_table, peers_table, site_table
from pier_node.errors import PierError
from pier_node.site import require_folder

NOT_RUNNING = 3
"""Exit code, as that of an init script for a service that is not running."""
EVERY = 1.0
"""Seconds between two looks of --watch."""


def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Print it, once or until Ctrl+C; returns the exit code.

    Raises:
        PierError: there is no such folder, or the daemon does not answer when it is asked once.
    """
    require_folder(folder)
    console = Console()
    running = find_daemon(folder)
    if running is None:
        return _show_disk(folder, console, as_json)
    if not watch:
        _show(running.status(), console, as_json)
        return 0
    try:
        _follow(folder, running, console, as_json)
    except KeyboardInterrupt:
        return 0
    return _show_disk(folder, console, as_json)


def _show_disk(folder: Path, console: Console, as_json: bool) -> int:
    found = {"running": False, **on_disk(folder)}
    if as_json:
        print(json.dumps(found))
    else:
        console.print(disk_table(found))
    return NOT_RUNNING


def _show(found: Status, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"running": True, **found}), flush=True)
    else:
        console.print(_tables(found))


def _tables(found: Status) -> RenderableType:
    return Group(site_table(found), "", peers_table(found))


def _follow(folder: Path, running: Running, console: Console, as_json: bool) -> None:
    """Show the status again and again; return when the daemon has ended. A busy one is asked again."""
    with Live(console=console, auto_refresh=False) as live:
        while find_daemon(folder) == running:
            try:
                found = running.status()
            except PierError as error:
                print(error.problem, file=sys.stderr)
            else:
                if as_json or not console.is_terminal:
                    _show(found, console, as_json)
                else:
                    live.update(_tables(found), refresh=True)
            time.sleep(EVERY)
