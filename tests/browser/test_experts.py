"""Experts on the page: who trains what, what came out, and each site's work, planned and done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.experts_cases import EXPERTS, PROGRESS, board_with_experts, planned
from browser.looking import A, looking, run_of_three
from coordinator.page_cases import serving
from playwright.async_api import expect

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = pytest.mark.browser


async def test_it_shows_experts_and_schedule_and_follows_them(chromium: Browser) -> None:
    board = board_with_experts()
    async with serving(board) as address, looking(chromium, address) as look:
        page = look.page
        rows, lanes = page.locator("#experts tbody tr"), page.locator("#schedule li")
        await expect(rows).to_have_count(6)
        assert await rows.nth(0).locator("td").all_inner_texts() == [
            *("topics", "accepted", "lab-a", "L", "30 of 30", "2.110", "−0.430 ± 0.011", "14.1 s")
        ]
        await expect(rows.nth(1)).to_contain_text("refused")
        await expect(rows.nth(1)).to_contain_text("+0.010 ± 0.011")
        await expect(rows.nth(2)).to_contain_text("60 of 107")
        await expect(rows.nth(5)).to_contain_text("no site can")
        await expect(page.locator("#experts-words")).to_have_text(
            "2 of 6 experts done, 1 of them refused: its parent stands in; "
            "planned to take 56.3 s. No site can train: tools"
        )
        await expect(lanes).to_have_count(3)
        bar = page.get_by_role("img", name="lab-a: topics 100 %, network 25 %, encodings 0 %")
        await expect(bar).to_be_visible()
        await expect(lanes.nth(0)).to_contain_text("33 % of 56.3 s")  # 14.1 and a quarter of 18.2
        board.planned(planned(*EXPERTS, **{**PROGRESS, "network": {"done": 20, "loss": 1.5, "state": "training"}}))
        await expect(rows.nth(3)).to_contain_text("20 of 40")
        await expect(page.get_by_role("img", name="network 50 %")).to_be_visible()
        assert look.errors == []


async def test_one_that_goes_elsewhere_changes_its_bar(chromium: Browser) -> None:
    board = board_with_experts()
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#schedule li")).to_have_count(3)
        board.planned(planned(*((domain, size, steps, A, took) for domain, size, steps, _, took in EXPERTS)))
        await expect(look.page.locator("#schedule li")).to_have_count(1)
        await expect(look.page.get_by_role("img", name="numbers 0 %")).to_be_visible()
        assert look.errors == []


async def test_when_all_are_there_it_says_how_to_have_them_answer(chromium: Browser) -> None:
    board = board_with_experts()
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#experts tbody tr")).to_have_count(6)
        await expect(look.page.locator("#experts-serve")).to_be_hidden()
        board.planned(planned(EXPERTS[0], topics=PROGRESS["topics"]))
        await expect(look.page.locator("#experts-command")).to_have_text(
            "pier-coordinator experts collect ensemble --from LAB-A_FOLDER && pier-node serve --experts ensemble"
        )
        assert look.errors == []


async def test_without_a_plan_there_is_nothing_of_it(chromium: Browser) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#sites tbody tr")).to_have_count(3)
        await expect(look.page.get_by_role("heading", name="Experts")).to_be_hidden()
        assert look.errors == []


async def test_they_fit_a_small_phone(chromium: Browser) -> None:
    small = {"viewport": {"width": 360, "height": 780}}
    async with serving(board_with_experts()) as address, looking(chromium, address, **small) as look:
        await expect(look.page.locator("#experts tbody tr")).to_have_count(6)
        assert await look.number("document.documentElement.scrollWidth") <= 360
        assert look.errors == []
