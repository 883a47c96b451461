"""A finding: one line of the doctor's table, with what to change if something is wrong; and how findings are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

THIS_SITE = "this site"


class Verdict(Enum):
    """The judgement in one word."""

    OK = "ok"
    ADVICE = "advice"
    """The site can take part, but could do better."""
    PROBLEM = "PROBLEM"
    """The site cannot take part, or not for long, or wastes most of its time."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        site: THIS_SITE, or the name of a peer.
        check: what was checked.
        detail: what was found, with units.
        remedy: what to change, where, and to what.
        values: the same as numbers, for programs; names end in their units.
    """

    site: str
    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


COLOURS = {Verdict.OK: "green", Verdict.ADVICE: "yellow", Verdict.PROBLEM: "bold red", Verdict.UNKNOWN: "dim"}


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as a table, followed by what to change."""
    console.print(_findings_table(findings))
    same = {
        remedy: [it for it in findings if it.remedy == remedy] for remedy in (it.remedy for it in findings) if remedy
    }
    for number, (remedy, lines) in enumerate(same.items(), 1):
        sites = ", ".join(finding.site for finding in lines)
        heading = f"{number}. {sites}: {lines[0].check}: {lines[0].verdict.value}"
        console.print(f"\n[{COLOURS[lines[0].verdict]}]{escape(heading)}[/]", highlight=False)
        console.print(Padding(escape(remedy), (0, 0, 0, 3)), highlight=False)
    console.print(f"\n{_summary(findings)}", highlight=False)


def as_fields(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings for programs."""
    lines = [{**asdict(finding), "verdict": finding.verdict.value.lower()} for finding in findings]
    return {"ok": not is_wrong(findings), "findings": lines}


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("site", overflow="fold", max_width=21)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    for site, lines in groupby(findings, key=lambda finding: finding.site):
        for index, finding in enumerate(lines):
            verdict = f"[{COLOURS[finding.verdict]}]{finding.verdict.value}[/]"
            table.add_row("" if index else escape(site), finding.check, verdict, escape(finding.detail))
    return table


def _summary(findings: Sequence[Finding]) -> str:
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    if problems:
        return f"{problems} problem{'s' * (problems > 1)}: change what is said above and ask again."
    advice = any(finding.verdict is Verdict.ADVICE for finding in findings)
    return "Nothing is wrong; it could be better." if advice else "Nothing is wrong."


def is_wrong(findings: Sequence[Finding]) -> bool:
    """Whether one of them is a problem."""
    return any(finding.verdict is Verdict.PROBLEM for finding in findings)
