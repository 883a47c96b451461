"""Quick tests come first. What cannot be tested on this machine is skipped, and said so in the last lines."""

from __future__ import annotations

import signal

import pytest

SLOW = ("processes", "netns", "browser", "multisite")
"""Tests with one of these marks are marked `slow` too."""
NO_CUDA = "no CUDA device here: NOT tested"
LOUD = "NOT tested"
"""In a reason to skip: the last lines repeat it."""


def pytest_configure() -> None:
    # Where a script starts pytest in the background, Ctrl+C is ignored, also by the programs that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        if LOUD in reason:
            terminalreporter.write_line(f"SKIPPED {report.nodeid}: {reason.removeprefix('Skipped: ')}", yellow=True)
