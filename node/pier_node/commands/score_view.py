"""Scores of an ensemble as tables: the best method of each domain marked, and those that are as good."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pier_node.experts.comparison import Standing
from pier_node.experts.report import Report
from pier_node.units import count

BEST, TIED, BEHIND, NEW = "*", "=", " ", "°"
NOTE = (
    f"{BEST} best; {TIED} tied with it: the 95 % interval of the difference has 0 in it (paired bootstrap over rows). "
    f"top-N: decay over the N likeliest experts; single: one expert. The priors, and which experts, are from rows that "
    f"are not scored. geometric is a diagnostic, no mixture. {NEW} has no expert."
)
FORGOTTEN = (
    "Each expert alone, less what it branched from, on rows that nobody was trained on: above 0 it has forgotten what "
    "that knew."
)


def report_tables(report: Report) -> RenderableType:
    """Bits per byte, and perplexity a byte."""
    rows = sum(result.rows for result in report.domains.values())
    head = f"{len(report.experts)} experts, {len(report.domains)} domains, {count(rows)} rows"
    bits = _table(report, "bits per byte", lambda standing: f"{standing.bits_per_byte:.3f}")
    perplexity = _table(report, "perplexity", lambda standing: f"{standing.perplexity:.2f}")
    return Group(head, "", bits, "", perplexity, "", NOTE, *_forgotten(report))


def _forgotten(report: Report) -> Iterator[RenderableType]:
    """A row for each expert whose parent was scored as well; nothing, if there is none."""
    table = _columns("bits per byte against its parent")
    for name in ("own domain", "others, mean", "worst", ""):
        table.add_column(name, justify="left" if not name else "right")
    for index, expert in enumerate(report.experts):
        gaps = {name: gap for name, it in report.domains.items() if (gap := it.forgotten[index]) is not None}
        others = {name: gap for name, gap in gaps.items() if name != expert}
        if expert in gaps and others:
            worst = max(others, key=others.__getitem__)
            cells = (gaps[expert], sum(others.values()) / len(others), others[worst])
            table.add_row(escape(expert), *(f"{gap:+.3f}" for gap in cells), escape(worst))
    if table.row_count:
        yield from ("", table, "", FORGOTTEN)


def _table(report: Report, title: str, shown: Callable[[Standing], str]) -> Table:
    table = _columns(title)
    for name in report.mean:
        table.add_column(name, justify="right")
    for domain, result in report.domains.items():
        mark = "" if domain in report.experts else f" {NEW}"
        table.add_row(escape(domain) + mark, *(_cell(result.standings[name], shown) for name in report.mean))
    if len(report.domains) > 1:
        table.add_row("mean", *(_cell(standing, shown) for standing in report.mean.values()))
    return table


def _columns(first: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def _cell(standing: Standing, shown: Callable[[Standing], str]) -> str:
    if standing.is_best:
        return f"[bold green]{shown(standing)}{BEST}[/]"
    return f"[green]{shown(standing)}{TIED}[/]" if standing.is_tied else f"{shown(standing)}{BEHIND}"
