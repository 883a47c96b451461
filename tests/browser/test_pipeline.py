"""A pipeline on the page: the schedule of an iteration as a picture, and each site's stage and times."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.looking import A, B, C, looking, run_of_three
from coordinator.page_cases import serving
from PIL import Image
from playwright.async_api import expect

from pier_coordinator.runs.pipeline import Drawing
from pier_coordinator.runs.read_model import ReadModel
from pier_node.pipeline.planning.gantt import gantt_svg
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem, Site
from pier_node.pipeline.planning.simulator import Schedule, Task

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = pytest.mark.browser

PROBLEM = Problem(tuple(Site(name, 1.0, 2.0, 0.5, 3) for name in "abc"), ((0.1,) * 3,) * 3, (1, 1, 1), 2, 1)
SCHEDULE = Schedule(3, (Task(0, 0, "forward", 0.0, 0.0, 1.0), Task(0, 0, "loss", 4.0, 5.0, 9.0)), ())
SVG = gantt_svg(PROBLEM, Plan(((0,), (1,), (2,)), (((0, 1),),)), SCHEDULE, "one microbatch")
DRAWING = Drawing(7, "6 microbatches through 2 of 3 stages", 9.0, [[A], [B], [C]], {A: 0.56, B: 0.0, C: 0.1}, SVG)
NATURAL = "document.querySelector('#gantt img').naturalWidth"


def piped() -> ReadModel:
    """A board of a pipeline, whose paths nobody has told yet."""
    board = run_of_three()
    for stage, node in enumerate((A, B, C)):
        place = {"stage": stage, "memory": 3, "forward": 0.5, "backward": 1.25, "loss": 0.0 if stage else 0.125}
        board.pulse(node, {"phase": "PHASE_TRAINING", "place": place}, alive=True)
    return board


async def test_it_shows_chart_and_stages_and_follows_them(chromium: Browser) -> None:
    board = piped()
    async with serving(board) as address, looking(chromium, address) as look:
        page = look.page
        rows, gantt = page.locator("#stages tbody tr"), page.locator("#gantt img")
        await expect(page.locator("#pipeline-words")).to_have_text("No paths are planned yet.")
        await expect(gantt).to_be_hidden()
        board.drawn(DRAWING)
        await expect(gantt).to_be_visible()
        assert await rows.nth(0).locator("td").all_inner_texts() == [
            *("lab-a", "0", "56 %", "500 ms", "1.25 s", "125 ms", "3 microbatches")
        ]
        await expect(page.locator("#pipeline-words")).to_have_text(
            "6 microbatches through 2 of 3 stages: an iteration is planned to take 9 s. Paths since round 7."
        )
        await expect(page.get_by_role("img", name="Busy: lab-a 56 %, lab-b 0 %, lab-c 10 %")).to_be_visible()
        assert await look.number(NATURAL) == 1200
        before = await gantt.get_attribute("src")
        board.drawn(replace(DRAWING, seconds=4.5))
        await expect(page.locator("#pipeline-words")).to_contain_text("4.5 s")
        assert await gantt.get_attribute("src") != before
        assert look.errors == []


async def test_the_chart_is_drawn_for_the_dark_and_for_the_light(chromium: Browser) -> None:
    board = piped()
    board.drawn(DRAWING)
    grounds = {}
    for scheme in ("dark", "light"):
        async with serving(board) as address, looking(chromium, address, color_scheme=scheme) as look:
            picture = look.page.locator("#gantt img")
            await expect(picture).to_be_visible()
            grounds[scheme] = _corner(await picture.screenshot())
    assert grounds == {"dark": (0x15, 0x1B, 0x23), "light": (0xFF, 0xFF, 0xFF)}


async def test_it_fits_a_small_phone_and_the_chart_scrolls(chromium: Browser) -> None:
    board = piped()
    board.drawn(DRAWING)
    small = {"viewport": {"width": 360, "height": 780}}
    async with serving(board) as address, looking(chromium, address, **small) as look:
        await expect(look.page.locator("#gantt img")).to_be_visible()
        assert await look.number("document.documentElement.scrollWidth") <= 360
        assert await look.number("document.getElementById('gantt').scrollWidth") >= 900
        assert look.errors == []


async def test_without_a_pipeline_there_is_nothing_of_it(chromium: Browser) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#sites tbody tr")).to_have_count(3)
        await expect(look.page.get_by_role("heading", name="Pipeline")).to_be_hidden()
        assert look.errors == []


def _corner(png: bytes) -> object:
    """The colour of a pixel in it."""
    return Image.open(io.BytesIO(png)).convert("RGB").getpixel((4, 4))
