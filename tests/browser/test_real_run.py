"""The page of a run that is real: its coordinator, its sites, their training."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

import pytest
from processes.coordinated import coordinated, polite
from processes.run import ENDLESS

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.looking import looking
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.processes]

GONE = "net::ERR_"
"""What Chromium says of a coordinator that does not run."""


@pytest.mark.smoke
async def test_it_shows_what_happens_and_outlives_the_coordinator(chromium: Browser, tmp_path: Path) -> None:
    with coordinated(tmp_path, 2, inner={**ENDLESS, "eval_every": 2}) as run:
        for site in run.sites:
            site.reach(4)
        async with looking(chromium, f"http://{run.page}") as look:
            rows, title = look.page.locator("#sites tbody tr"), look.page.locator("#run-name")
            await expect(title).to_have_text("test")
            await expect(rows).to_have_count(2)
            await expect(look.page.locator("#t-sites")).to_have_text("2 of 2")
            await expect(look.page.locator("#map svg circle")).to_have_count(2)
            await expect(look.page.locator("#events")).to_contain_text("alpha was let in with invite")
            before = await look.page.locator("#t-round").inner_text()
            await expect(look.page.locator("#t-round")).not_to_have_text(before)
            assert look.errors == []
            run.end(SIGKILL)
            await expect(look.page.locator("#connection")).to_have_text("reconnecting")
            run.start()
            await expect(look.page.locator("#connection")).to_have_text("live")
            before = await look.page.locator("#t-round").inner_text()
            await expect(look.page.locator("#t-round")).not_to_have_text(before)
            run.say("pause")
            await expect(look.page.locator("#sites")).to_contain_text("paused")
            assert [error for error in look.errors if GONE not in error] == []
        run.say("resume")
        polite(run)
