"""The commands that ask a running coordinator: what it shows, and what it is told to do."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from pier_coordinator.commands.client import Answer, Client
from pier_coordinator.commands.tables import SILENT, events_table, nodes_table, status_view

EVERY = 1.0
"""Seconds between two looks of --watch."""
ALL_WELL, SITES_SILENT = 0, 3
"""Exit codes of `status` and `nodes`."""


def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Show the run, once or until Ctrl+C; returns the exit code. Raises PierError."""
    client, console = Client.of(folder), Console()
    if watch and not as_json:
        try:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(status_view(_whole(client)), refresh=True)
                    time.sleep(EVERY)
        except KeyboardInterrupt:
            return ALL_WELL
    found = _whole(client)
    if as_json:
        print(json.dumps(found))
    else:
        console.print(status_view(found))
    return _code(found["sites"])


def _code(sites: Sequence[Answer]) -> int:
    return SITES_SILENT if any(site["state"] == SILENT for site in sites) else ALL_WELL


def nodes(folder: Path, as_json: bool) -> int:
    """Show the sites; returns the exit code. Raises PierError."""
    found = Client.of(folder).get("/api/nodes")["sites"]
    if as_json:
        print(json.dumps(found))
    else:
        Console().print(nodes_table(found) if found else "No site has come yet: `pier-coordinator invite` lets one in.")
    return _code(found)


def events(folder: Path, as_json: bool, limit: int, of_sites: bool) -> None:
    """Show what happened, or only what the sites logged; the newest last. Raises PierError."""
    found = Client.of(folder).get("/api/events?limit=500")["events"]
    wanted = [event for event in found if event["kind"] == "note" or not of_sites][-limit:]
    if as_json:
        print(json.dumps(wanted))
    else:
        Console().print(events_table(wanted) if wanted else "Nothing yet.")


def invite(folder: Path, as_json: bool, name: str, expires: float, uses: int) -> None:
    """Print the command that brings a site in. Raises PierError."""
    made = Client.of(folder).act("invite", name=name, expires_seconds=expires, uses=uses)
    if as_json:
        print(json.dumps(made))
        return
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(made["expires"]))
    often = "once" if uses == 1 else f"{uses} times"
    console = Console()
    console.print(f"Run this at the site; it can be used {often}, until {until}:\n", highlight=False)
    console.print(f"  {made['command']}\n", highlight=False, soft_wrap=True)
    console.print(f"To take it back: pier-coordinator revoke --data {folder} {made['id']}", style="dim", soft_wrap=True)


def order(folder: Path, action: str, sites: Sequence[str], as_json: bool) -> None:
    """Pause, resume or stop sites, or all. Raises PierError."""
    whom = ", ".join(sites) or "all sites"
    done = {"pause": f"{whom}: pause at the next round", "resume": f"{whom}: go on", "stop": f"{whom}: leave the run"}
    act(folder, action, done[action], as_json, nodes=[*sites])


def revoke(folder: Path, site: str, as_json: bool) -> None:
    """Put a site out, or take an invite back. Raises PierError."""
    answer = Client.of(folder).act("revoke", node=site)
    print(json.dumps(answer) if as_json else _revoked(folder, answer))


def _revoked(folder: Path, answer: Answer) -> str:
    said = []
    if "site" in answer:
        said += [f"{answer['site']} is revoked: within a few seconds no other site has anything to do with it."]
    if "site" in answer and answer["invite"]:
        said += [
            f"Its invite {answer['invite']} had uses left and is taken back with it, or it could come in again.",
            f"For sites that are still to come, make another: pier-coordinator invite --data {folder}",
        ]
    elif answer["invite"]:
        said += [f"The invite {answer['invite']} is taken back: no site can come in with it any more."]
    if answer["sites"]:
        said += ["Other sites that came in with the same invite stay. To revoke them as well:", ""]
        said += [f"  pier-coordinator revoke --data {folder} {name}" for name in answer["sites"]] + [""]
    return "\n".join(said)


def act(folder: Path, action: str, said: str, as_json: bool, **body: Any) -> None:
    """Have the coordinator do something, and say so. Raises PierError."""
    answer = Client.of(folder).act(action, **body)
    print(json.dumps(answer) if as_json else said)


def _whole(client: Client) -> dict[str, Any]:
    return client.get("/api/board")
