"""`pier-coordinator evaluate`: compares mixtures of experts at several sites by the score sheets that sites send."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pier_coordinator.commands.client import Answer, Client
from pier_coordinator.identity.home import SCORES
from pier_node.base.errors import PierError
from pier_node.commands.ensemble import sections_of, show
from pier_node.experts.comparison import distinct, evaluated
from pier_node.experts.sheet import ENDING, Sheet, load_sheet

MOST_SHEETS = 20_000
LOOK = 0.5
"""Seconds between two requests for the sites' progress."""


@dataclass(frozen=True)
class Asked:
    """What the sites are asked to score.

    Attributes:
        folder: the run's folder.
        domains: domains to score besides those of the experts.
        file: experts.toml, which says where the text of these domains is.
        rows: number of rows per domain and split; 0: all.
        patience: seconds after which an expert is given up if nothing arrives for it.
    """

    folder: Path
    domains: tuple[str, ...]
    file: Path | None
    rows: int
    patience: float


def evaluate(places: Sequence[Path], top_k: int, plot: Path | None, as_json: bool) -> None:
    """Print the evaluation of some sheets. Raises PierError: one is invalid, or they do not fit together."""
    files = list(_files(places))
    if len(files) > MOST_SHEETS:
        raise PierError(f"{len(files)} score sheets are too many; {MOST_SHEETS} at most", "Give fewer at a time.")
    sheets = [load_sheet(file) for file in files]
    show(Console(), evaluated(distinct(sheets), top_k), plot, as_json)


def evaluate_run(asked: Asked, top_k: int, plot: Path | None, as_json: bool) -> bool:
    """Let the sites of a run score its experts, wait for them, and print the result.

    Returns:
        Whether all experts were scored on all domains.

    Raises:
        PierError: no coordinator runs, there is no plan, or nothing was scored.
    """
    client, errors = Client.of(asked.folder), Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    domains = [section.model_dump(exclude={"weight", "sites"}) for section in sections_of(asked.domains, asked.file)]
    client.act("evaluate", domains=domains, rows=asked.rows, patience=asked.patience)
    told = _followed(client, errors)
    missing = {row["domain"]: row["problem"] for row in told["experts"] if row["problem"]}
    for what, why in missing.items():
        errors.print(f"The expert of {what} is missing: {why}", style="yellow")
    for what, why in told["left_out"].items():
        errors.print(f"{what} is left out: {why}", style="yellow")
    sheets = _sheets(client.home.folder / SCORES / told["id"], told, missing)
    if not sheets:
        raise PierError("no expert was scored", "What is missing is said above. Start its sites, and evaluate again.")
    more = {"missing": missing, "left_out": told["left_out"]}
    show(Console(), evaluated(distinct(sheets), top_k), plot, as_json, more)
    return not missing and not told["left_out"]


def _followed(client: Client, errors: Console) -> Answer:
    """Wait for the end of the evaluation and return its result; show its progress and which sites must be restarted."""
    said: set[str] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("score sheets", total=None)
        while not (told := _told(client))["finished"]:
            rows = [row for row in told["experts"] if row["sheets"] < row["of"] and not row["problem"]]
            for site in sorted({row["site"] for row in rows if row["site"] and not row["there"]} - said):
                errors.print(f"{site} is not there: it must be started again (there: pier-node start --data FOLDER)")
                said.add(site)
            awaited = ", ".join(row["domain"] if row["trained"] else f"{row['domain']} (in training)" for row in rows)
            done, total = (sum(row[key] for row in told["experts"]) for key in ("sheets", "of"))
            progress.update(task, description=f"score sheets of {awaited}", completed=done, total=total)
            time.sleep(LOOK)
    return told


def _told(client: Client) -> Answer:
    """The progress of the evaluation. Raises PierError: the coordinator knows of none."""
    told = client.act("evaluation")
    if "finished" not in told:
        raise PierError(
            "the evaluation has ended: the coordinator was restarted, or another plan was accepted",
            "Give the same command again: sites score what is missing.",
        )
    return told


def _sheets(folder: Path, told: Answer, missing: Mapping[str, Any]) -> list[Sheet]:
    """The sheets of the experts that were scored, in the order of the plan. Raises PierError."""
    order = {row["domain"]: place for place, row in enumerate(told["experts"])}
    found = [load_sheet(file) for file in sorted(folder.glob(f"*{ENDING}"))]
    used = [
        sheet
        for sheet in found
        if sheet.subject.expert in order
        and sheet.subject.expert not in missing
        and sheet.subject.domain not in told["left_out"]
    ]
    return sorted(used, key=lambda it: (order[it.subject.expert], order.get(it.subject.domain, len(order))))


def _files(places: Sequence[Path]) -> Iterator[Path]:
    """The files of the sheets; within a folder, ordered by name."""
    for place in places:
        found = sorted(place.glob(f"*{ENDING}")) if place.is_dir() else [place]
        if not found:
            raise PierError(f"{place}: there is no score sheet", "Make some with: pier-node score FOLDER --save FOLDER")
        yield from found
