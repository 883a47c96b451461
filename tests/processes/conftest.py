"""Every test gets runs of its own, which end with it; when it fails, the ends of their logs are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes.run import Run

Found = Callable[..., Run]
NO_NAMESPACES = "not root, or no `ip` and `tc` here (Debian: iproute2): a slow line between two hosts is NOT tested"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        if NO_NAMESPACES in str(report.longrepr):
            terminalreporter.write_line(f"SKIPPED {report.nodeid}: {NO_NAMESPACES}", yellow=True)


@pytest.fixture
def found(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Found]:
    """Makes a run: `found(sites, inner={...}, outer={...})`."""
    runs: list[Run] = []

    def make(sites: int, twin: Run | None = None, **tables: dict[str, object]) -> Run:
        run = Run(tmp_path / f"run{len(runs)}", sites, twin, **tables)
        runs.append(run)
        return run

    failures = request.session.testsfailed
    yield make
    for run in runs:
        for site in run.sites:
            site.kill()
    if request.session.testsfailed > failures:
        print("\n".join(site.tail() for run in runs for site in run.sites))
    for run in runs:
        run.check()
