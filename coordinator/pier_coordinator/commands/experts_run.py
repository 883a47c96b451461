"""`pier-coordinator experts start | status | collect`: from a plan to an ensemble."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pier_coordinator.commands.client import Client
from pier_coordinator.commands.experts import found
from pier_coordinator.commands.experts_view import view
from pier_coordinator.experts.plan import accepted
from pier_coordinator.identity.home import PLAN_FILE
from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.units import UNKNOWN, number, span
from pier_node.config.run import RunConfig
from pier_node.experts.card import ENSEMBLE_FILE, Ensemble, Member, load_card
from pier_node.experts.config import ExpertsConfig, load

COLUMNS = ("domain", "size", "steps", "site", "done", "planned", "took", "bits/byte before", "after", "± error", "")


def start(file: Path, folder: Path, yes: bool, as_json: bool) -> None:
    """Plan, ask for confirmation, and let the sites train. Raises PierError."""
    client, config = Client.of(folder), load(file)
    check_seed(config, client.home.config)
    planning = found(config, folder)
    plan = accepted(config, planning.task, planning.chosen, planning.sites, planning.digests)
    if not as_json:
        Console().print(view(planning))
    if not yes:
        click.confirm("Have the sites train these experts as soon as the run is finished?", abort=True)
    durable.replace(folder / PLAN_FILE, plan.model_dump_json(indent=1).encode())
    client.act("experts", plan=plan.id)
    follow = f"pier-coordinator experts status --data {folder}"
    print(json.dumps({"plan": plan.id}) if as_json else f"Accepted as {plan.id[:8]}. To follow it: {follow}")


def status(folder: Path, as_json: bool) -> bool:
    """Print which site trains what and how good it is; return whether all experts are done. Raises PierError."""
    known = Client.of(folder).act("experts-told")
    if as_json:
        print(json.dumps(known))
    elif known["plan"] is None:
        print("No plan was accepted yet: pier-coordinator experts start")
    else:
        complete = "complete" if known["complete"] else f"planned to take {span(known['seconds'])}"
        Console().print(Text(f"plan {known['plan'][:8]}, {known['mode']}: {complete}"), experts_table(known["experts"]))
        if known["complete"]:
            Console().print(f"\nTo have them answer:\n\n  {serving(known['experts'], folder)}\n", soft_wrap=True)
    return bool(known.get("complete"))


def serving(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """The shell command that collects an ensemble and serves it."""
    sites = " ".join(f"--from {site.upper()}_FOLDER" for site in sorted({row["site"] for row in rows}))
    collected = f"pier-coordinator experts collect ensemble --data {folder} {sites}"
    return f"{collected} && pier-node serve --experts ensemble"


def collect(folder: Path, sites: Sequence[Path], out: Path) -> str:
    """Copy the experts from the sites' folders into one; return what to tell the user. Raises PierError."""
    known = Client.of(folder).act("experts-told")
    if not known.get("complete"):
        missing = [row["domain"] for row in known["experts"] if not row["name"]]
        raise PierError(
            f"the ensemble is not complete: no expert yet of {', '.join(missing) or 'anything, no plan was accepted'}",
            "`pier-coordinator experts status` shows how far it is.",
        )
    if out.exists() and any(out.iterdir()) and not (out / ENSEMBLE_FILE).exists():
        raise PierError(f"{out} holds something else than an ensemble", "Name a new folder.")
    try:
        members = [_found(row, sites) for row in _last(known["experts"])]
        for _, place in members:
            shutil.copytree(place, out / place.name, dirs_exist_ok=True)
        Ensemble(members=tuple(member for member, _ in members)).save(out)
    except OSError as error:
        raise PierError(f"{out}: {error}", "Choose a folder that has room and can be written.") from error
    return f"Collected {len(members)} experts in {out}\nTo answer with them: pier-node serve --experts {out}"


def experts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A table with a row per expert: what it is, which site trains it, and its result."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("domain", "size", "site", "") else "right", no_wrap=True)
    for row in rows:
        gate = Text(UNKNOWN)
        if row["name"]:
            gate = Text("accepted", "green") if row["accepted"] else Text("refused: the parent stands in", "yellow")
        losses = (number(row[key], 3) for key in ("parent_loss", "loss", "standard_error"))
        done = f"{100 * row['done'] / row['steps']:.0f} %"
        times = span(row["planned_seconds"]), UNKNOWN if row["seconds"] is None else span(row["seconds"])
        what = row["domain"], row["size"], str(row["steps"]), row["site"] or "nobody"
        table.add_row(*what, done, *times, *losses, gate)
    return table


def check_seed(config: ExpertsConfig, run: RunConfig) -> None:
    """Check that experts can branch from the run's model. Raises PierError."""
    here, there = (each.model_dump(exclude={"preset"}) for each in (config.model, run.model))
    for key, value in here.items():
        if value != there[key]:
            raise PierError(
                f"S is not the model of the run: experts.toml has model.{key} = {value}, run.toml {there[key]}",
                "Give experts.toml the [model] of run.toml: experts branch from the run's model.",
            )
    if run.data.tokenizer != "bytes":
        raise PierError(
            f"the run has data.tokenizer = {run.data.tokenizer}: experts know bytes only", 'Run with "bytes".'
        )
    if run.outer.algorithm == "noloco" and not run.outer.final_merge:
        raise PierError(
            "in a run of pairs (noloco) each site ends with a model of its own: there is no common seed",
            "Set outer.final_merge = true in run.toml, or choose another outer.algorithm.",
        )


def _last(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The experts from which no other expert branches."""
    parents = {row["after"] for row in rows}
    return (row for row in rows if row["number"] not in parents)


def _found(row: dict[str, Any], sites: Sequence[Path]) -> tuple[Member, Path]:
    """An expert, or its parent if it was refused, and the folder where it is."""
    place = _find(row["name"], sites, row)
    card = load_card(place)
    if not card.accepted:
        place = _find(card.parent[:32], [place.parent.parent], row)
    return Member(domain=row["domain"], folder=place.name, stands_in=not card.accepted), place


def _find(name: str, sites: Sequence[Path], row: dict[str, Any]) -> Path:
    for site in sites:
        if (found := site / "experts" / name).is_dir():
            return found
    raise PierError(
        f"the expert of {row['domain']} is in none of the folders: {row['site']} has it, as experts/{name}",
        "Name the --data folder of that site with --from, or a copy of it.",
    )
