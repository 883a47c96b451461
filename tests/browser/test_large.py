"""A thousand sites and a hundred thousand rounds: the page stays usable. Prints what it measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from coordinator.page_cases import serving
from coordinator.played import many, node, pulse

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.looking import looking, size
from playwright.async_api import expect

pytestmark = pytest.mark.browser

SITES = many(1000)
ROUNDS = 100_000


def large() -> ReadModel:
    """One site's rounds from the first to the last, and of all sites the last ten and some samples."""
    board, now = ReadModel(), time.time()
    body = {"name": "large", "algorithm": "noloco", "rounds": 2 * ROUNDS, "sites": len(SITES)}
    board.apply(Fact(now, "run", "", body))
    for lab in SITES:
        board.apply(Fact(now - 500, "site", node(lab.name), {"name": lab.name, "version": "0.1.0"}))
    first = node(SITES[0].name)
    for number in range(1, ROUNDS - 9):
        times = {"compute": 20.0 + number % 7, "waiting": 1.0, "exchange": 2.0}
        board.apply(Fact(now - 30 * (ROUNDS - number), "round", first, {"round": number, **times}))
    for number in range(ROUNDS - 9, ROUNDS + 1):
        for lab in SITES:
            when, parts = now - 30 * (ROUNDS - number), {"compute": lab.compute, "waiting": 24 - lab.compute}
            board.apply(Fact(when, "round", node(lab.name), {"round": number, **parts, "loss": 2.5}))
            board.apply(Fact(when, "sample", node(lab.name), {"loss": 2.5, "tokens_per_second": lab.speed}))
    beat(board)
    return board


def beat(board: ReadModel) -> None:
    """All sites send a heartbeat."""
    for lab in SITES:
        board.pulse(node(lab.name), pulse(lab, ROUNDS), alive=True)


async def test_a_large_run_stays_usable(chromium: Browser) -> None:
    board = large()
    began = time.perf_counter()
    told = board.snapshot()
    made = time.perf_counter() - began
    async with serving(board) as address, looking(chromium, address) as look:
        page = look.page
        await expect(page.locator("#sites tbody tr")).to_have_count(15)
        await expect(page.locator("#c-speed canvas")).to_be_visible()
        loaded = await look.number("performance.getEntriesByName('pier-update')[0].startTime")
        await expect(page.locator("#page-of")).to_have_text("1 of 67 · 1,000 sites")
        await page.get_by_label("Search sites").fill("site-0777")
        await expect(page.locator("#sites tbody tr")).to_have_count(1)
        await page.get_by_label("show site-0777 in the charts").check()
        await expect(page.locator("#c-speed .keys li")).to_have_count(2)
        for _ in range(3):
            count = await look.number("performance.getEntriesByName('pier-update').length")
            beat(board)
            while await look.number("performance.getEntriesByName('pier-update').length") == count:
                await page.evaluate("new Promise(requestAnimationFrame)")
        update = await look.number(
            "Math.max(...performance.getEntriesByName('pier-update').slice(1).map((it) => it.duration))"
        )
        elements = await look.number("document.querySelectorAll('*').length")
        assert look.errors == []
    print(
        f"\n1,000 sites, 100,000 rounds: snapshot {size(told) / 1e3:.0f} kB in {1000 * made:.0f} ms, "
        f"on the screen after {loaded:.0f} ms, update {update:.0f} ms, {elements:.0f} elements"
    )
    assert size(told) < 1_500_000
    assert made < 2.0
    assert loaded < 8000
    assert update < 400
    assert elements < 4000
