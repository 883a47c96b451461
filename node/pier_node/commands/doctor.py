"""`pier-node doctor`: shows the findings of an examination, and what to change."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from pier_node.doctor.examination import examine
from pier_node.doctor.finding import Finding, Verdict
from pier_node.site.settings import Settings

COLOURS = {Verdict.OK: "green", Verdict.ADVICE: "yellow", Verdict.PROBLEM: "bold red", Verdict.UNKNOWN: "dim"}


def doctor(settings: Settings, as_json: bool) -> int:
    """Examine and print. Returns the exit code: 1 if there is a problem. Raises PierError."""
    logging.basicConfig(level=logging.ERROR)  # problems of the run appear in the table
    with Console(stderr=True).status("Looking at the sites of the run, one after the other ..."):
        findings = asyncio.run(examine(settings))
    if as_json:
        print(json.dumps(as_fields(findings)))
    else:
        show(findings, Console())
    return int(_is_wrong(findings))


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as a table, followed by what to change."""
    console.print(_table(findings))
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
    lines = [
        {
            "site": finding.site,
            "check": finding.check,
            "verdict": finding.verdict.value.lower(),
            "detail": finding.detail,
            "remedy": finding.remedy,
            "values": dict(finding.values),
        }
        for finding in findings
    ]
    return {"ok": not _is_wrong(findings), "findings": lines}


def _table(findings: Sequence[Finding]) -> Table:
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


def _is_wrong(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict is Verdict.PROBLEM for finding in findings)
