"""The commands that show and operate a run through its running coordinator, and their tables for the terminal."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pier_coordinator.commands.client import Answer, Client
from pier_coordinator.runs.sites import REVOKED
from pier_node.base.errors import PierError
from pier_node.base.units import UNKNOWN, amount, count, number
from pier_node.identity.node import TOKEN_VARIABLE, write_private

LEVELS = {20: "", 30: "yellow", 40: "red"}
SILENT = "silent"
"""State of a site that has not been heard from for longer than its lease."""
NUMBERS = ("round", "loss", "tokens/s", "sent")
AT_WORK = ("training", "exchanging", "waiting", "done")


def sites_table(sites: list[Answer]) -> Table:
    """A table of the sites of the run and how each is doing."""
    table = Table(box=None, pad_edge=False)
    for name in ("site", "state", "round", "loss", "tokens/s", "sent", "order"):
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for site in sites:
        table.add_row(
            Text(str(site["name"] or UNKNOWN), "bold"),
            _state(site),
            count(site["round"]),
            number(site["loss"], 3),
            count(site["tokens_per_second"]),
            UNKNOWN if site["bytes_sent"] is None else amount(site["bytes_sent"]),
            "" if site["activity"] in ("", "train") or site["state"] == REVOKED else str(site["activity"]),
        )
    return table


def nodes_table(sites: list[Answer]) -> Table:
    """A table of the sites of the run and where they are."""
    table = Table(box=None, pad_edge=False)
    for name in ("site", "node", "state", "address", "version"):
        table.add_column(name, no_wrap=True)
    for site in sites:
        called, where = Text(str(site["name"]), "bold"), Text(str(site["address"] or UNKNOWN))
        table.add_row(called, str(site["node"]), _state(site), where, Text(str(site["version"] or UNKNOWN)))
    return table


def status_view(board: Answer) -> RenderableType:
    """The run in one line, its alerts and its sites."""
    run, totals = board["run"], board["totals"]
    progress = f"  {run['algorithm']}  round {totals['round']} of {run['rounds']}"
    pace = f"  {count(totals['tokens_per_second'])} tokens/s  loss {number(totals['loss'], 3)}"
    paused = f"  {totals['paused']} of {totals['alive']} paused" if totals["paused"] else ""
    head = Text.assemble((str(run["name"]), "bold"), progress, pace, (paused, "yellow"))
    alerts = [Text(f"! {alert['text']}", "yellow") for alert in board["alerts"]]
    sites = board["sites"]
    return Group(head, *alerts, "", sites_table(sites) if sites else Text("No site has come yet.", "dim"))


def events_table(events: list[Answer]) -> Table:
    """A table of events, one line each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for event in events:
        when = datetime.fromtimestamp(event["time"]).strftime("%m-%d %H:%M:%S")
        name, said = Text(str(event["name"] or "")), Text(str(event["text"]), LEVELS.get(event["level"], "red"))
        table.add_row(when, name, said)
    return table


def _state(site: Answer) -> Text:
    state = str(site["state"])
    return Text(state, "red" if state in (SILENT, REVOKED) else "green" if state in AT_WORK else "yellow")


EVERY = 1.0
"""Seconds between two updates of --watch."""
ALL_WELL, SITES_SILENT = 0, 3
"""Exit codes of `status` and `nodes`."""


def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Show the run, once or until Ctrl+C; return the exit code. Raises PierError."""
    client, console = Client.of(folder), Console()
    if watch and not as_json:
        try:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(status_view(client.get("/api/board")), refresh=True)
                    time.sleep(EVERY)
        except KeyboardInterrupt:
            return ALL_WELL
    found = client.get("/api/board")
    if as_json:
        print(json.dumps(found))
    else:
        console.print(status_view(found))
    return _code(found["sites"])


def _code(sites: Sequence[Answer]) -> int:
    return SITES_SILENT if any(site["state"] == SILENT for site in sites) else ALL_WELL


def nodes(folder: Path, as_json: bool) -> int:
    """Show the sites; return the exit code. Raises PierError."""
    found = Client.of(folder).get("/api/nodes")["sites"]
    if as_json:
        print(json.dumps(found))
    else:
        Console().print(nodes_table(found) if found else "No site has come yet: `pier-coordinator invite` lets one in.")
    return _code(found)


def events(folder: Path, as_json: bool, limit: int, of_sites: bool) -> None:
    """Show the events, or only what the sites logged, the newest last. Raises PierError."""
    found = Client.of(folder).get("/api/events?limit=500")["events"]
    wanted = [event for event in found if event["kind"] == "note" or not of_sites][-limit:]
    if as_json:
        print(json.dumps(wanted))
    else:
        Console().print(events_table(wanted) if wanted else "Nothing yet.")


def invite(folder: Path, as_json: bool, token_file: Path | None, **wanted: str | float) -> None:
    """Make an invite; print the command that a site joins with, and the token that it asks for.

    Args:
        token_file: gets the token, which is then not printed.
        wanted: name, expires_seconds and uses.

    Raises:
        PierError: no coordinator runs there, or the file cannot be written.
    """
    made = Client.of(folder).act("invite", **wanted)
    if token_file:
        try:
            write_private(token_file, f"{made['token']}\n".encode())
        except OSError as error:
            remedy = f"Revoke invite {made['id']}, and name a file in a folder that you can write."
            raise PierError(f"{token_file}: {error.strerror}", remedy) from error
        made = {**made, "token": "", "command": f"{made['command']} --token-file {shlex.quote(token_file.name)}"}
    if as_json:
        print(json.dumps(made))
        return
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(made["expires"]))
    often = "once" if wanted["uses"] == 1 else f"{wanted['uses']} times"
    console = Console(markup=False)
    console.print(f"Run this at the site; it can be used {often}, until {until}:\n", highlight=False)
    console.print(f"  {made['command']}\n", highlight=False, soft_wrap=True)
    if token_file:
        said = f"The token is in {token_file}. Copy that file to the site first, and delete it here.\n"
        console.print(said, highlight=False, soft_wrap=True)
    else:
        console.print(f"It asks for this token:\n\n  {made['token']}\n", highlight=False, soft_wrap=True)
        where = f"Where nobody can answer, give it as {TOKEN_VARIABLE}, or in a file: --token-file FILE.\n"
        console.print(where, highlight=False, soft_wrap=True)
    console.print(
        f"To take it back: pier-coordinator revoke --data {shlex.quote(str(folder))} {made['id']}",
        style="dim",
        soft_wrap=True,
    )


def order(folder: Path, action: str, sites: Sequence[str], as_json: bool) -> None:
    """Pause, resume or stop sites, or all of them. Raises PierError."""
    whom = ", ".join(sites) or "all sites"
    done = {"pause": f"{whom}: pause at the next round", "resume": f"{whom}: go on", "stop": f"{whom}: leave the run"}
    act(folder, action, done[action], as_json, nodes=[*sites])


def revoke(folder: Path, site: str, as_json: bool) -> None:
    """Revoke a site or an invite. Raises PierError."""
    answer = Client.of(folder).act("revoke", node=site)
    print(json.dumps(answer) if as_json else _revoked(folder, answer))


def _revoked(folder: Path, answer: Answer) -> str:
    said, data = [], f"--data {shlex.quote(str(folder))}"
    if "site" in answer:
        said += [f"{answer['site']} is revoked: within a few seconds no other site has anything to do with it."]
    if "site" in answer and answer["invite"]:
        said += [
            f"Its invite {answer['invite']} had uses left and is taken back with it, or it could come in again.",
            f"For sites that are still to come, make another: pier-coordinator invite {data}",
        ]
    elif answer["invite"]:
        said += [f"The invite {answer['invite']} is taken back: no site can come in with it any more."]
    if answer["sites"]:
        said += ["Other sites that came in with the same invite stay. To revoke them as well:", ""]
        said += [f"  pier-coordinator revoke {data} {shlex.quote(name)}" for name in answer["sites"]] + [""]
    return "\n".join(said)


def act(folder: Path, action: str, said: str, as_json: bool, **body: Any) -> None:
    """Request an action from the coordinator and print what was done. Raises PierError."""
    answer = Client.of(folder).act(action, **body)
    print(json.dumps(answer) if as_json else said)
