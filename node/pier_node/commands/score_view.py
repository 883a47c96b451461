"""Scores of an ensemble as tables: the best method of each domain marked, and those that are as good."""

from __future__ import annotations

from collections.abc import Callable

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


def report_tables(report: Report) -> RenderableType:
    """Bits per byte, and perplexity a byte."""
    rows = sum(result.rows for result in report.domains.values())
    head = f"{len(report.experts)} experts, {len(report.domains)} domains, {count(rows)} rows"
    bits = _table(report, "bits per byte", lambda standing: f"{standing.bits_per_byte:.3f}")
    perplexity = _table(report, "perplexity", lambda standing: f"{standing.perplexity:.2f}")
    return Group(head, "", bits, "", perplexity, "", NOTE)


def _table(report: Report, title: str, shown: Callable[[Standing], str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(title, no_wrap=True)
    for name in report.mean:
        table.add_column(name, justify="right")
    for domain, result in report.domains.items():
        mark = "" if domain in report.experts else f" {NEW}"
        table.add_row(escape(domain) + mark, *(_cell(result.standings[name], shown) for name in report.mean))
    if len(report.domains) > 1:
        table.add_row("mean", *(_cell(standing, shown) for standing in report.mean.values()))
    return table


def _cell(standing: Standing, shown: Callable[[Standing], str]) -> str:
    if standing.is_best:
        return f"[bold green]{shown(standing)}{BEST}[/]"
    return f"[green]{shown(standing)}{TIED}[/]" if standing.is_tied else f"{shown(standing)}{BEHIND}"
