"""Takes the pictures of the page in docs/images: PYTHONPATH=node:coordinator:protos:tests python -m browser.pictures"""

from __future__ import annotations

import asyncio
import io
import shutil
from pathlib import Path
from typing import Any

from browser.conftest import FLAGS
from browser.looking import looking, run_of_three
from coordinator.page_cases import Recorded, serving
from PIL import Image
from playwright.async_api import Browser, async_playwright, expect

IMAGES = Path(__file__).parents[2] / "docs" / "images"


async def take(browser: Browser, address: str, name: str, full: bool, **how: Any) -> None:
    """Save the page's picture, in 256 colours."""
    async with looking(browser, address, **how) as look:
        await expect(look.page.locator("#c-speed canvas")).to_be_visible()
        await expect(look.page.locator("#rounds-words")).to_contain_text("slowest")
        await expect(look.page.locator("#map svg")).to_be_visible()
        await expect(look.page.locator("#c-speed .keys li")).to_have_count(4)
        picture = Image.open(io.BytesIO(await look.page.screenshot(full_page=full)))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


async def main() -> None:
    """Both pictures."""
    async with async_playwright() as playwright, serving(run_of_three(), Recorded()) as address:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        await take(browser, address, "coordinator-page.png", full=True)
        await take(browser, address, "coordinator-phone.png", full=False, viewport={"width": 360, "height": 1180})
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
