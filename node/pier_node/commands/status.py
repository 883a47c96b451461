"""`pier-node status`: what a site and its peers are doing, or what is on the disk of a site that does not run.

The tables are for people: numbers have units, and nothing is expressed by colour alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pier_node.base.errors import PierError
from pier_node.base.units import UNKNOWN, age, amount, count, number, percent
from pier_node.rounds.folder import require_folder
from pier_node.site.running import Running, Status, find_daemon, on_disk

DIGITS = 12
"""Hex digits of a digest to show."""


def site_table(status: Status) -> RenderableType:
    """This site and its run."""
    table = _pairs(f"{escape(status['name'])} ({status['node']}) at {status['address'] or 'no address yet'}")
    members = len(status["members"])
    table.add_row("run", f"{status['run']} ({status['run_hash'][:8]})")
    table.add_row("round", f"{status['round']} of {status['rounds']}, step {_steps(status)}")
    table.add_row(
        "state", f"digest {status['digest'][:DIGITS] or UNKNOWN}, made by {members} site{'s' * (members != 1)}"
    )
    if status["fingerprint"]:
        table.add_row("fingerprint", status["fingerprint"])
    table.add_row("phase", status["phase"])
    if status["expert"]:
        table.add_row("expert", escape(status["expert"]))
    table.add_row(
        "loss", f"{number(status['loss'], 4)}, validation {number(status['validation_loss'], 4)} (nats a token)"
    )
    table.add_row("speed", f"{count(status['tokens_per_second'])} tokens/s; {count(status['tokens'])} tokens so far")
    table.add_row("sent", f"{amount(status['bytes_sent'])}; last outer round {number(status['round_seconds'], 2)} s")
    table.add_row("utilisation", f"{percent(status['utilisation'])} of the time in inner steps")
    if _in_pairs(status):
        table.add_row(
            "replicas", f"spread {_spread(status['spread'])}, {_spread(status['mean_spread'])} over all sites"
        )
    if status["message"]:
        table.add_row("message", escape(status["message"]))
    return table


def peers_table(status: Status) -> RenderableType:
    """The other sites, and the last errors of those that do not answer."""
    peers = status["peers"]
    if not peers:
        return "No other site is known yet."
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("site", overflow="fold")
    for name in ("phase", "round"):
        table.add_column(name, no_wrap=True)
    table.add_column("spread" if _in_pairs(status) else "same state", no_wrap=True)
    for name in ("loss", "tokens/s", "ms away"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("alive", no_wrap=True)
    for peer in peers:
        table.add_row(*_peer_row(peer, status))
    silent = [peer for peer in peers if not peer["alive"] and peer["last_error"]]
    notes = [f"{_called(peer)} is silent: {escape(peer['last_error'])}" for peer in silent]
    return Group(table, *notes)


def disk_table(found: dict[str, Any]) -> RenderableType:
    """A site that does not run."""
    table = _pairs(f"No daemon runs for {escape(found['data'])}.")
    if "run" in found:
        table.add_row("run", f"{found['run']} ({found['run_hash'][:8]})")
        table.add_row("on disk", _saved(found))
    else:
        table.add_row("on disk", "no run: this folder has not been started yet")
    table.add_row("start it", escape(found["command"]))
    return table


def _pairs(title: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title=title, title_justify="left", pad_edge=False)
    table.title_style = "bold"
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _peer_row(peer: Status, status: Status) -> list[str]:
    away = f"{1000 * peer['round_trip']:.1f}" if peer["round_trip"] else UNKNOWN
    alive = "yes" if peer["alive"] else "[red]no[/red]"
    agreement = _spread(peer["spread"]) if _in_pairs(status) else _agreement(peer, status)
    speed = count(peer["tokens_per_second"])
    return [_called(peer), peer["phase"], str(peer["round"]), agreement, number(peer["loss"], 3), speed, away, alive]


def _in_pairs(status: Status) -> bool:
    """Whether every site has its own state."""
    return bool(status["algorithm"] == "noloco")


def _spread(value: float | None) -> str:
    """Standard deviation of a weight between replicas."""
    return UNKNOWN if value is None else f"{value:.2e}"


def _agreement(peer: Status, status: Status) -> str:
    """Whether a peer has the same state. Digests can be compared only at the same round."""
    if not (peer["digest"] and status["digest"]):
        return UNKNOWN
    if peer["round"] != status["round"]:
        return "ahead" if peer["round"] > status["round"] else "behind"
    return "[green]✓ yes[/green]" if peer["digest"] == status["digest"] else "[bold red]✗ NO[/bold red]"


def _called(peer: Status) -> str:
    return escape(peer["name"]) or str(peer["node"])


def _steps(status: Status) -> str:
    return f"{count(status['inner_step'])} of {count(status['total_steps'])}"


def _saved(found: dict[str, Any]) -> str:
    if "round" not in found:
        return f"no checkpoint yet of {found['rounds']} rounds"
    saved = f"round {found['round']} of {found['rounds']}, digest {found['digest'][:DIGITS]}"
    return f"{saved}, saved {age(found['age_seconds'])} ago"


NOT_RUNNING = 3
"""Exit code; an init script uses the same one for a service that is not running."""
EVERY = 1.0
"""Seconds between two updates of --watch."""


def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Print the status, once or until Ctrl+C. Returns the exit code.

    Raises:
        PierError: there is no such folder, or the daemon does not answer a single request.
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
    """Show the status repeatedly. Returns when the daemon has ended; a busy daemon is asked again."""
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
