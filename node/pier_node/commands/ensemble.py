"""`pier-node score`: how well the experts of an ensemble and their mixtures predict every domain.

It prints tables and draws a plot. The tables mark the best method of each domain and those tied with it, and the plot
shows how far each method is behind the best. The folder of a single expert is scored for others: its sheets are saved
for `pier-coordinator evaluate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pier_node.base.errors import PierError
from pier_node.base.log import print_as_is
from pier_node.base.units import count
from pier_node.experts.card import ENSEMBLE_FILE, load_ensemble
from pier_node.experts.comparison import UNRANKED, Report, Standing, evaluated
from pier_node.experts.config import DomainSection, load
from pier_node.experts.scoring import Parents, expert_in, parent_of, sheets_of, texts_of
from pier_node.experts.sheet import Sheet
from pier_node.rounds.saved_model import pick_device
from pier_node.trainer.model.export import read_config

WIDTH = 0.8
"""Fraction of the space between two domains that the points of one domain occupy."""


def draw(report: Report, file: Path) -> None:
    """Write the plot in the format of the file's suffix (.svg, .png, .pdf)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [name for name in report.mean if name not in UNRANKED]
    columns = {**{domain: result.standings for domain, result in report.domains.items()}, "mean": report.mean}
    if report.excluded:
        columns[f"mean {NEW}"] = report.excluded
    figure, axes = pyplot.subplots(figsize=(max(6, 1.5 * len(columns)), 4.5))
    for number, name in enumerate(names):
        standings = [column[name] for column in columns.values()]
        places = [at + WIDTH * ((number + 0.5) / len(names) - 0.5) for at in range(len(columns))]
        middle = [standing.behind for standing in standings]
        below = [max(0.0, standing.behind - standing.low) for standing in standings]
        above = [max(0.0, standing.high - standing.behind) for standing in standings]
        axes.errorbar(places, middle, yerr=[below, above], fmt="o", markersize=4, capsize=2, label=name)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(columns)), [*columns], rotation=30, ha="right")
    axes.set_ylabel("bits per byte behind the best")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


BEST, TIED, BEHIND, NEW = "*", "=", " ", "°"
NOTE = (
    f"{BEST} best; {TIED} tied with it: the 95 % interval of the difference has 0 in it (paired bootstrap over rows). "
    f"top-N: decay over the N likeliest experts; single: one expert. The priors, and which experts, are from rows that "
    f"are not scored. geometric is a diagnostic, no mixture. {NEW} has no expert: none was trained on it."
)
FORGOTTEN = (
    "Each expert alone, less what it branched from, on rows that nobody was trained on: above 0 it has forgotten what "
    "that knew."
)


def report_tables(report: Report) -> RenderableType:
    """Bits per byte, and perplexity per byte."""
    rows = sum(result.rows for result in report.domains.values())
    head = f"{len(report.experts)} experts, {len(report.domains)} domains, {count(rows)} rows"
    bits = _score_table(report, "bits per byte", lambda standing: f"{standing.bits_per_byte:.3f}")
    perplexity = _score_table(report, "perplexity", lambda standing: f"{standing.perplexity:.2f}")
    return Group(head, "", bits, "", perplexity, "", NOTE, *_forgotten(report))


def _forgotten(report: Report) -> Iterator[RenderableType]:
    """A row for each expert whose parent was also scored; nothing if there is none."""
    table = columns("bits per byte against its parent")
    for name in ("own domain", "others, mean", "worst", ""):
        table.add_column(name, justify="left" if not name else "right", overflow="ellipsis")
    for index, expert in enumerate(report.experts):
        gaps = {name: gap for name, it in report.domains.items() if (gap := it.forgotten[index]) is not None}
        others = {name: gap for name, gap in gaps.items() if name != expert}
        if expert in gaps and others:
            worst = max(others, key=others.__getitem__)
            cells = (gaps[expert], sum(others.values()) / len(others), others[worst])
            table.add_row(escape(expert), *(f"{gap:+.3f}" for gap in cells), escape(worst))
    if table.row_count:
        yield from ("", table, "", FORGOTTEN)


def _score_table(report: Report, title: str, shown: Callable[[Standing], str]) -> Table:
    table = columns(title)
    for name in report.mean:
        table.add_column(name, justify="right", no_wrap=True)
    for domain, result in report.domains.items():
        mark = "" if domain in report.experts else f" {NEW}"
        table.add_row(escape(domain) + mark, *(_cell(result.standings[name], shown) for name in report.mean))
    if len(report.domains) > 1:
        table.add_row("mean", *(_cell(standing, shown) for standing in report.mean.values()))
    if report.excluded:
        table.add_row(f"mean {NEW}", *(_cell(standing, shown) for standing in report.excluded.values()))
    return table


def columns(first: str) -> Table:
    """A table whose first column has this title."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first, overflow="ellipsis")
    return table


def _cell(standing: Standing, shown: Callable[[Standing], str]) -> str:
    if standing.is_best:
        return f"[bold green]{shown(standing)}{BEST}[/]"
    return f"[green]{shown(standing)}{TIED}[/]" if standing.is_tied else f"{shown(standing)}{BEHIND}"


@dataclass(frozen=True)
class ScoreOptions:
    """The options of `pier-node score`.

    Attributes:
        folder: of an ensemble, or of one expert.
        file: experts.toml, which says where the text of domains is; None: all are built-in ones.
        domains: domains to score besides those of the experts.
        rows: number per domain and split; 0: all.
        top_k: number of experts that a mixture chooses; 0: one, and two.
        save: folder for the sheets.
    """

    folder: Path
    file: Path | None
    domains: tuple[str, ...]
    rows: int
    top_k: int
    save: Path | None
    plot: Path | None
    device: str


def score(options: ScoreOptions, as_json: bool) -> None:
    """Score, and print the results. Raises PierError."""
    console = Console()
    experts = experts_in(options.folder)
    if not (options.folder / ENSEMBLE_FILE).exists() and options.save is None:
        raise PierError(
            f"{options.folder}: one expert is no ensemble", "Save its scores for others with --save FOLDER."
        )
    sheets = list(_sheets(options, experts, Console(stderr=True)))
    if options.save is not None:
        _save(sheets, options.save)
        print_as_is(console, f"{len(sheets)} score sheets are in {options.save}")
    if (options.folder / ENSEMBLE_FILE).exists():
        show(console, evaluated(sheets, options.top_k), options.plot, as_json)


def show(
    console: Console, report: Report, plot: Path | None, as_json: bool, more: Mapping[str, Any] | None = None
) -> None:
    """Print a report and draw it; `more` is added to the JSON."""
    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps({**asdict(report), **(more or {})}))
    else:
        console.print(report_tables(report))


def experts_in(folder: Path) -> dict[str, Path]:
    """The folder of each expert by the name of its domain; a parent that stands in for several appears once.

    An expert that was refused has its parent next to it, which is scored instead.

    Raises:
        PierError: there is neither an ensemble nor an expert.
    """
    if not (folder / ENSEMBLE_FILE).exists():
        return dict([expert_in(folder)])
    places: dict[Path, str] = {}
    for member in load_ensemble(folder).members:
        places.setdefault(folder / member.folder, member.domain)
    return {domain: place for place, domain in places.items()}


def _sheets(options: ScoreOptions, experts: dict[str, Path], console: Console) -> Iterator[Sheet]:
    device, context = pick_device(options.device), min(read_config(place).context for place in experts.values())
    texts = texts_of(_sections(options, experts), context, options.rows)
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


def _sections(options: ScoreOptions, experts: dict[str, Path]) -> Sequence[DomainSection]:
    """The location of the domains' text, for the ensemble's domains and the requested ones."""
    ensemble = (options.folder / ENSEMBLE_FILE).exists()
    own = [member.domain for member in load_ensemble(options.folder).members] if ensemble else [*experts]
    return sections_of([*dict.fromkeys([*own, *options.domains])], options.file)


def sections_of(names: Sequence[str], file: Path | None) -> Sequence[DomainSection]:
    """The location of the domains' text from experts.toml; other domains are built in. Raises PierError."""
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
