"""`pier-node doctor`: shows what an examination found, and what to change."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from pier_node.doctor.examination import examine
from pier_node.doctor.finding import Finding, Verdict
from pier_node.join import Settings

COLOURS = {Verdict.OK: "green", Verdict.ADVICE: "yellow", Verdict.PROBLEM: "bold red", Verdict.UNKNOWN: "dim"}


def doctor(settings: Settings, as_json: bool) -> int:
    """Examine and print; returns the exit code: 1 when there is a problem. Raises PierError."""
    logging.getLogger("pier_node").setLevel(logging.ERROR)  # what is wrong stands in the table
    console = Console()
    with console.status("Looking at the sites of the run, one after the other ...") if not as_json else _silence():
        findings = asyncio.run(examine(settings))
    if as_json:
        print(json.dumps(as_fields(findings)))
    else:
        show(findings, console)
    return int(any(finding.verdict is Verdict.PROBLEM for finding in findings))
