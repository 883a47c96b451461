"""`pier-node score`: what the experts of a folder give every domain, and how well their mixtures do.

A folder of one expert alone is scored for others: its sheets are saved, and `pier-coordinator evaluate` takes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pier_node.commands.score_plot import draw
from pier_node.commands.score_view import report_tables
from pier_node.commands.weights import pick_device
from pier_node.errors import PierError
from pier_node.experts.config import DomainSection, load
from pier_node.experts.ensemble import ENSEMBLE_FILE, load_ensemble
from pier_node.experts.report import Report, evaluated
from pier_node.experts.scoring import Parents, expert_in, parent_of, sheets_of, texts_of
from pier_node.experts.sheet import Sheet
from pier_node.model.export import read_config


@dataclass(frozen=True)
class Settings:
    """What `pier-node score` was told.

    Attributes:
        folder: of an ensemble, or of one expert.
        file: experts.toml, which says where the text of domains is; None: all are built-in ones.
        domains: to score besides those of the experts.
        rows: of each domain and split; 0: all.
        top_k: experts that a mixture chooses; 0: one, and two.
        save: where to put the sheets.
    """

    folder: Path
    file: Path | None
    domains: tuple[str, ...]
    rows: int
    top_k: int
    save: Path | None
    plot: Path | None
    device: str


def score(settings: Settings, as_json: bool) -> None:
    """Score, and print what came out. Raises PierError."""
    console = Console()
    experts = experts_in(settings.folder)
    if not (settings.folder / ENSEMBLE_FILE).exists() and settings.save is None:
        raise PierError(
            f"{settings.folder}: one expert is no ensemble", "Save its scores for others with --save FOLDER."
        )
    sheets = list(_sheets(settings, experts, Console(stderr=True)))
    if settings.save is not None:
        _save(sheets, settings.save)
        console.print(f"{len(sheets)} score sheets are in {settings.save}", highlight=False, soft_wrap=True)
    if (settings.folder / ENSEMBLE_FILE).exists():
        show(console, evaluated(sheets, settings.top_k), settings.plot, as_json)


def show(
    console: Console, report: Report, plot: Path | None, as_json: bool, more: Mapping[str, Any] | None = None
) -> None:
    """Print a report, and draw it; JSON has `more` besides. Raises PierError: it cannot be drawn there."""
    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps({**report.as_json(), **(more or {})}))
    else:
        console.print(report_tables(report))


def experts_in(folder: Path) -> dict[str, Path]:
    """By the name of its domain, where each expert lies; a parent that stands in for several comes once.

    Beside an expert that was refused lies its parent, which is scored in its place.

    Raises:
        PierError: there is neither an ensemble nor an expert.
    """
    if not (folder / ENSEMBLE_FILE).exists():
        return dict([expert_in(folder)])
    places: dict[Path, str] = {}
    for member in load_ensemble(folder).members:
        places.setdefault(folder / member.folder, member.domain)
    return {domain: place for place, domain in places.items()}


def _sheets(settings: Settings, experts: dict[str, Path], console: Console) -> Iterator[Sheet]:
    device, context = pick_device(settings.device), min(read_config(place).context for place in experts.values())
    texts = texts_of(_sections(settings, experts), context, settings.rows)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        parents = len({*map(parent_of, experts.values())} - {None})
        tested = sum(len(rows) for (_, split), rows in texts.items() if split == "test")
        total = len(experts) * sum(map(len, texts.values())) + parents * tested
        task = progress.add_task("rows", total=total)
        before = Parents(texts, device, done := partial(progress.advance, task))
        for name, place in experts.items():
            progress.update(task, description=f"expert of {name}")
            yield from sheets_of(name, place, texts, device, before, done)


def _sections(settings: Settings, experts: dict[str, Path]) -> Sequence[DomainSection]:
    """Where the text of the domains is: all that the ensemble names, and those that were asked for."""
    ensemble = (settings.folder / ENSEMBLE_FILE).exists()
    own = [member.domain for member in load_ensemble(settings.folder).members] if ensemble else [*experts]
    return sections_of([*dict.fromkeys([*own, *settings.domains])], settings.file)


def sections_of(names: Sequence[str], file: Path | None) -> Sequence[DomainSection]:
    """Where the text of domains is, as experts.toml says it; those it does not have are built in. Raises PierError."""
    known = {section.name: section for section in load(file).domains} if file else {}
    return [known[name] if name in known else _builtin(name) for name in names]


def _builtin(name: str) -> DomainSection:
    try:
        return DomainSection(name=name)
    except ValueError as error:
        raise PierError(
            f"{name!r} is no built-in domain", "Say with --config experts.toml where its text is."
        ) from error


def _save(sheets: Sequence[Sheet], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for sheet in sheets:
            sheet.save(folder)
    except OSError as error:
        raise PierError(f"{folder}: {error.strerror}", "Choose a folder that can be written.") from error
