"""Tables for the terminal."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pier_node.units import amount, number

Row = dict[str, Any]

LEVELS = {20: "", 30: "yellow", 40: "red"}
UNKNOWN = "–"


def sites_table(sites: list[Row]) -> Table:
    """Who is in the run, and how each does."""
    table = Table(box=None, pad_edge=False)
    for name in ("site", "node", "state", "round", "loss", "tokens/s", "sent", "order", "address"):
        table.add_column(name, justify="right" if name in ("round", "loss", "tokens/s", "sent") else "left")
    for site in sites:
        table.add_row(
            Text(str(site["name"] or UNKNOWN), "bold"),
            str(site["node"]),
            _state(site),
            number(site["round"], 0),
            number(site["loss"], 3),
            number(site["tokens_per_second"], 0),
            UNKNOWN if site["bytes_sent"] is None else amount(site["bytes_sent"]),
            "" if site["activity"] in ("", "train") else str(site["activity"]),
            str(site["address"] or UNKNOWN),
        )
    return table


def status_view(board: Row) -> RenderableType:
    """The run in a line, its alerts, its sites."""
    run = board["run"]
    head = Text.assemble(
        (str(run.get("name", UNKNOWN)), "bold"),
        f"  {run.get('algorithm', '')}  round {board['round']} of {run.get('rounds', UNKNOWN)}",
    )
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
    if not site["alive"]:
        return Text("gone", "red")
    phase = str(site["phase"] or UNKNOWN).replace("_", " ")
    return Text(phase, "green" if phase in ("training", "exchanging", "waiting") else "yellow")
