"""The page of `pier-node serve`, as somebody sees it who types into it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from experts.serving.ensembles import make_ensemble, opened, served

from pier_node.experts.serving.generation import Asking

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.looking import looking
from playwright.async_api import expect

pytestmark = pytest.mark.browser

PHONE = {"width": 360, "height": 740}


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    return opened(make_ensemble(tmp_path / "mine"))


@pytest.fixture
async def address(asking: Asking) -> AsyncIterator[str]:
    async with served(asking) as address:
        yield address


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_every_token_is_coloured_by_the_expert_that_speaks(chromium: Browser, address: str, scheme: str) -> None:
    async with looking(chromium, address, color_scheme=scheme, viewport=PHONE) as look:
        page = look.page
        await page.fill("#count", "60")
        await page.click("#go")
        await expect(page.locator("#state")).to_have_text("60 tokens, done")
        tokens = page.locator("#text span:not(.prompt)")
        assert await tokens.count() == 60
        classes = {await tokens.nth(at).get_attribute("class") for at in range(60)}
        assert classes <= {"e0", "e1", "e2"}
        rows = page.locator("#experts tbody tr")
        assert [(await rows.nth(at).text_content() or "")[1:7] for at in range(3)] == ["topics", "encodi", "networ"]
        assert await look.number("document.documentElement.scrollWidth - innerWidth") <= 0
        assert await look.number("[...document.querySelectorAll('#words li')].length") >= 1
        await tokens.filter(has_text=re.compile("[!-~]")).first.hover()
        await expect(page.locator("#token")).to_contain_text("topics")
        assert look.errors == []


async def test_an_answer_can_be_stopped_and_another_asked_for(
    chromium: Browser, asking: Asking, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = asking.compute

    async def slowly(work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0.02)  # a busy browser must not come after the last token
        return await compute(work, *args)

    monkeypatch.setattr(asking, "compute", slowly)
    async with looking(chromium, address) as look:
        await look.page.fill("#count", "4096")
        await look.page.click("#go")
        await expect(look.page.locator("#text span").nth(5)).to_be_attached()
        await look.page.click("#stop")
        await expect(look.page.locator("#state")).to_contain_text("stopped")
        await look.page.fill("#count", "3")
        await look.page.select_option("#model", "network")
        await look.page.click("#go")
        await expect(look.page.locator("#state")).to_have_text("3 tokens, done")
        assert look.errors == []


async def test_what_goes_wrong_is_said(chromium: Browser, asking: Asking, address: str) -> None:
    async with looking(chromium, address) as look:
        for index in range(3):
            asking.pool.lose(index, "gone")
        await look.page.click("#go")
        await expect(look.page.locator("#problem")).to_have_text("no expert is left that can be read; the log says why")
        await expect(look.page.locator("#go")).to_be_enabled()
