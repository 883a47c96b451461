"""A real Chromium; without one these tests are skipped, and the last lines say so."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser

NO_BROWSER = "no Chromium, or no playwright here: the page was NOT looked at"
PATIENCE = 90_000.0
"""Milliseconds within which a page shows what is expected of it, on a busy machine."""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.async_api import async_playwright, expect
    except ImportError:
        pytest.skip(NO_BROWSER)
    if path is None:
        pytest.skip(NO_BROWSER)
    expect.set_options(timeout=PATIENCE)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        if NO_BROWSER in str(report.longrepr):
            terminalreporter.write_line(f"SKIPPED {report.nodeid}: {NO_BROWSER}", yellow=True)
