"""Tables for the terminal."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pier_coordinator.sites import REVOKED
from pier_node.units import UNKNOWN, amount, count, number

Row = dict[str, Any]

LEVELS = {20: "", 30: "yellow", 40: "red"}
SILENT = "silent"
"""State of a site that was not heard of for longer than its lease."""
NUMBERS = ("round", "loss", "tokens/s", "sent")
AT_WORK = ("training", "exchanging", "waiting", "done")


def sites_table(sites: list[Row]) -> Table:
    """Who is in the run, and how each does."""
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


def nodes_table(sites: list[Row]) -> Table:
    """Who is in the run, and where."""
    table = Table(box=None, pad_edge=False)
    for name in ("site", "node", "state", "address", "version"):
        table.add_column(name, no_wrap=True)
    for site in sites:
        called, where = Text(str(site["name"]), "bold"), str(site["address"] or UNKNOWN)
        table.add_row(called, str(site["node"]), _state(site), where, str(site["version"] or UNKNOWN))
    return table


def status_view(board: Row) -> RenderableType:
    """The run in a line, its alerts, its sites."""
    run, totals = board["run"], board["totals"]
    progress = f"  {run['algorithm']}  round {totals['round']} of {run['rounds']}"
    pace = f"  {count(totals['tokens_per_second'])} tokens/s  loss {number(totals['loss'], 3)}"
    paused = f"  {totals['paused']} of {totals['alive']} paused" if totals["paused"] else ""
    head = Text.assemble((str(run["name"]), "bold"), progress, pace, (paused, "yellow"))
    alerts = [Text(f"! {alert['text']}", "yellow") for alert in board["alerts"]]
    sites = board["sites"]
    return Group(head, *alerts, "", sites_table(sites) if sites else Text("No site has come yet.", "dim"))


def events_table(events: list[Row]) -> Table:
    """What happened, a line each."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for event in events:
        when = datetime.fromtimestamp(event["time"]).strftime("%m-%d %H:%M:%S")
        table.add_row(when, str(event["name"] or ""), Text(str(event["text"]), LEVELS.get(event["level"], "red")))
    return table


def _state(site: Row) -> Text:
    state = str(site["state"])
    return Text(state, "red" if state in (SILENT, REVOKED) else "green" if state in AT_WORK else "yellow")
