"""The page in a real browser: what it shows, that it is live, that the operator can act."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest
from coordinator.page_cases import TOKEN, Recorded, serving
from coordinator.played import LABS, Played, Replayed, many, pulse

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Route

pytest.importorskip("playwright", reason="no Chromium, or no playwright here: the page was NOT looked at")

from browser.looking import A, B, C, looking, run_of_three
from browser.proxied import proxied
from PIL import Image
from playwright.async_api import expect

pytestmark = pytest.mark.browser

SMALL = {"viewport": {"width": 360, "height": 780}}


async def test_it_shows_the_run_and_complains_of_nothing(chromium: Browser) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address) as look:
        page = look.page
        await expect(page.locator("#run-name")).to_have_text("atlantic")
        await expect(page).to_have_title("atlantic · Pier")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#t-round")).to_have_text("63 of 100")
        await expect(page.locator("#progress")).to_have_attribute("aria-valuenow", "63")
        await expect(page.locator("#sites tbody tr")).to_have_count(3)
        await expect(page.locator("#alerts")).to_contain_text("lab-b: 3 rounds late, uplink 4")
        await expect(page.locator("#alerts")).to_contain_text("try codec int4 or H = 200")
        await expect(page.locator("#rounds-words")).to_contain_text("lab-b was slowest in")
        await expect(page.locator("#sites .device").first).to_have_text(re.compile("2 x NVIDIA H100.*; 41 GB in use"))
        await expect(page.locator("#map svg circle")).to_have_count(3)
        await expect(page.locator("#map svg path")).to_have_count(6)
        await expect(page.locator("#events li").first).to_contain_text("round 41: lab-b sent nothing")
        for chart in ("#c-loss", "#c-validation", "#c-speed"):
            await expect(page.locator(f"{chart} canvas")).to_be_visible()
            await expect(page.locator(f"{chart} .plot-box")).to_have_attribute("aria-label", re.compile("lab-c [0-9]"))
        await page.locator("#links-all summary").click()
        await expect(page.locator("#links tbody tr")).to_have_count(6)
        assert look.errors == []


async def test_until_the_first_data_have_come_it_says_that_it_loads(chromium: Browser) -> None:
    async with serving(run_of_three()) as address, looking(chromium, "about:blank") as look:
        go_on = asyncio.Event()

        async def later(route: Route) -> None:
            await go_on.wait()
            await route.continue_()

        await look.page.route("**/api/stream", later)
        await look.page.goto(address)
        await expect(look.page.locator("#loading")).to_be_visible()
        for panel in ("#sites", "#no-sites", "#no-events", "#charts"):
            await expect(look.page.locator(panel)).to_be_hidden()
        go_on.set()
        await expect(look.page.locator("#sites tbody tr")).to_have_count(3)
        await expect(look.page.locator("#loading")).to_be_hidden()
        assert look.errors == []


async def test_it_is_live(chromium: Browser) -> None:
    board = run_of_three()
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#t-round")).to_have_text("63 of 100")
        board.apply(Fact(time.time(), "round", A, {"round": 64, "compute": 20.0, "exchange": 9.0}))
        board.apply(Fact(time.time(), "note", A, {"level": 40, "text": "<b>disk</b> is full"}))
        await expect(look.page.locator("#t-round")).to_have_text("64 of 100")
        await expect(look.page.locator("#events li").first).to_contain_text("error: <b>disk</b> is full")
        await expect(look.page.locator("#alerts")).to_contain_text("lab-a: <b>disk</b> is full")
        board.pulse(C, {}, alive=False)
        await expect(look.page.locator("#sites tbody tr").nth(2)).to_contain_text("silent")
        await expect(look.page.locator("#t-sites")).to_have_text("2 of 3")
        board.pulse(C, pulse(LABS[2], 64), alive=True)
        await expect(look.page.locator("#sites tbody tr").nth(2)).to_contain_text("training")
        assert look.errors == []


async def test_a_revoked_site_is_marked_and_its_links_vanish(chromium: Browser) -> None:
    board = run_of_three()
    async with serving(board) as address, looking(chromium, address) as look:
        await look.page.locator("#links-all summary").click()
        await expect(look.page.locator("#links tbody tr")).to_have_count(6)
        board.apply(Fact(time.time(), "event", C, {"level": 30, "text": "lab-c was revoked", "state": "revoked"}))
        await expect(look.page.locator("#sites tbody tr").nth(2).locator(".state")).to_have_text("revoked")
        await expect(look.page.locator("#links tbody tr")).to_have_count(2)
        await expect(look.page.locator("#map svg path")).to_have_count(2)
        left = LABS[0].speed  # lab-b catches up
        await expect(look.page.locator("#t-speed")).to_have_text(f"{left:,.0f}")
        await expect(look.page.locator("#c-speed .keys b").first).to_have_text(f"{left:,.0f}")
        assert look.errors == []


async def test_a_bandwidth_is_shown_only_when_it_was_measured(chromium: Browser) -> None:
    board = ReadModel()
    for node in (A, B, C):
        board.pulse(node, {"phase": "training"}, alive=True)
    for peer, bandwidth in ((B, 2.5e6), (C, 0.0)):
        board.apply(Fact(time.time(), "link", A, {"peer": peer, "round_trip": 0.01, "bandwidth": bandwidth}))
    async with serving(board) as address, looking(chromium, address) as look:
        await look.page.locator("#links-all summary").click()
        shown = look.page.locator("#links tbody td:nth-child(3)")
        await expect(shown).to_have_count(2)
        assert sorted(await shown.all_inner_texts()) == ["20 Mbit/s", "not measured"]
        await expect(look.page.locator("#map .fine")).to_have_text(["20 Mbit/s"])
        assert look.errors == []


async def test_it_survives_a_restart_of_the_coordinator(chromium: Browser) -> None:
    async with serving(run_of_three()) as address:
        port = int(address.rsplit(":", 1)[1])
        context = looking(chromium, address)
        look = await context.__aenter__()
        await expect(look.page.locator("#t-round")).to_have_text("63 of 100")
    await expect(look.page.locator("#connection")).to_have_text("reconnecting")
    board = run_of_three(rounds=70, late=0, name="pacific")
    async with serving(board, port=port):
        await expect(look.page.locator("#t-round")).to_have_text("70 of 100")
        await expect(look.page.locator("#run-name")).to_have_text("pacific")
        await expect(look.page.locator("#connection")).to_have_text("live")
        await expect(look.page.locator("#alerts")).to_be_empty()
        board.apply(Fact(time.time(), "round", A, {"round": 71, "compute": 20.0}))
        await expect(look.page.locator("#t-round")).to_have_text("71 of 100")
    await context.__aexit__(None, None, None)


async def test_without_a_token_nothing_can_be_done(chromium: Browser) -> None:
    async with serving(run_of_three(), Recorded()) as address, looking(chromium, address) as look:
        page = look.page
        await expect(page.locator("#operator")).to_be_visible()
        await expect(page.locator("#operations")).to_be_hidden()
        await page.locator("#operator").click()
        await page.locator("#token").fill("wrong")
        await page.locator("#dialog-ok").click()
        await expect(page.locator("#dialog-problem")).to_have_text("that is not the operator's token")
        await expect(page.locator("#operations")).to_be_hidden()


async def test_the_operator_acts(chromium: Browser) -> None:
    actions = Recorded()
    may = ["clipboard-read", "clipboard-write"]
    async with serving(run_of_three(), actions) as address, looking(chromium, address, permissions=may) as look:
        page = look.page
        await page.locator("#operator").click()
        await page.locator("#token").fill(TOKEN)
        await page.keyboard.press("Enter")
        await page.locator("[data-act=pause]").click()
        await expect(page.locator("#dialog")).to_contain_text("Pause all sites?")
        await page.locator("#dialog-ok").click()
        await expect(page.locator("#toast")).to_have_text("All sites: will pause at the next round boundary")
        await page.locator("[data-act=stop]").click()
        await page.locator("#dialog-cancel").click()
        await page.get_by_label("actions on lab-b").click()
        await page.get_by_role("button", name="Revoke").click()
        await expect(page.locator("#dialog")).to_contain_text("it can come back with a new invite only")
        await page.locator("#dialog-ok").click()
        await expect(page.locator("#toast")).to_have_text("lab-b: is no longer part of the run")
        await page.locator("[data-act=invite]").click()
        await page.get_by_label("Name").fill("lab-d")
        await page.locator("#dialog-ok").click()
        for what, text in (("command", "pier-node start --coordinator host:7700"), ("token", "pierinvite1-x")):
            button = page.get_by_role("button", name=f"Copy the {what}")
            await button.click()
            await expect(button).to_have_text("Copied")
            assert await page.evaluate("navigator.clipboard.readText()") == text
        assert actions.asked == [("pause", []), ("revoke", B), ("invite", "lab-d", 86400.0, 1)]
        assert look.errors == []


async def test_it_works_behind_a_proxy_that_sends_another_host(chromium: Browser) -> None:
    actions, names = Recorded(), ["localhost"]
    async with (
        serving(run_of_three(), actions, hosts=names) as page,
        proxied(page) as port,
        looking(chromium, f"http://localhost:{port}") as look,
    ):
        await expect(look.page.locator("#connection")).to_have_text("live")
        await look.page.locator("#operator").click()
        await look.page.locator("#token").fill(TOKEN)
        await look.page.keyboard.press("Enter")
        await expect(look.page.locator("#dialog-problem")).to_contain_text(f"--host localhost:{port}")
        names.append(f"localhost:{port}")
        await look.page.locator("#dialog-ok").click()
        await look.page.locator("[data-act=resume]").click()
        await expect(look.page.locator("#toast")).to_have_text("All sites: will train on")
        assert actions.asked == [("train", [])]


async def test_charts_have_another_axis_are_smoothed_and_saved(chromium: Browser) -> None:
    board = run_of_three()
    board.apply(Fact(time.time(), "site", A, {"name": '=1+"a"'}))
    async with serving(board) as address, looking(chromium, address) as look:
        page = look.page
        await expect(page.locator("#c-loss .keys li")).to_have_count(4)
        for axis, last in (("inner_step", 3150), ("tokens", 39_624_000), ("round", 63)):
            await page.locator("#axis").select_option(axis)
            head, *rows = await _saved_csv(page)
            assert head == f'"{axis}","mean","mean least","mean most","\'=1+""a""","lab-b","lab-c"'
            places = [float(row.partition(",")[0]) for row in rows]
            assert places == sorted(places)
            assert places[-1] == pytest.approx(last, rel=0.02)
        rough = await page.locator("#c-loss canvas").screenshot()
        await page.locator("#smoothing").focus()
        await page.keyboard.press("End")
        await expect(page.locator("#smoothing-said")).to_have_text("0.98")
        assert await page.locator("#c-loss canvas").screenshot() != rough
        assert (await _saved_csv(page))[1:] == rows  # as it was measured
        async with page.expect_download() as saving:
            await page.get_by_label("Save Learning rate as PNG").click()
        picture = Image.open(await (await saving.value).path())
        assert picture.height > 220
        board.apply(Fact(time.time(), "site", "late", {"name": "lab-bc"}))
        keys = page.locator("#c-loss .keys li")
        await expect(keys).to_have_text([re.compile(it) for it in ("mean", "=1", "lab-b", "lab-bc", "lab-c")])
        assert look.errors == []


async def test_a_run_is_compared_with_an_earlier_one(chromium: Browser, tmp_path: Path) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address) as look:
        page, keys = look.page, look.page.locator("#c-loss .keys li")
        await expect(keys).to_have_count(4)
        async with page.expect_download() as saving:
            await page.get_by_role("button", name="Save curves").click()
        saved, damaged = tmp_path / "saved.json", tmp_path / "damaged.json"
        saved.write_bytes((await (await saving.value).path()).read_bytes().replace(b'"atlantic"', b'"<i>before"'))
        damaged.write_text('{"format": "pier-curves-1", "curves": {"loss": [[1, "x"]]}}')
        await page.locator("#compare-file").set_input_files(damaged)
        await expect(page.locator("#compare-said")).to_have_text("cannot be compared: a curve in it is damaged")
        await page.locator("#compare-file").set_input_files(saved)
        await expect(page.locator("#compare-said")).to_have_text("with <i>before")
        await expect(keys).to_have_count(5)
        await expect(keys.last).to_have_text(re.compile("^<i>before[0-9.]+$"))
        await page.get_by_role("button", name="Stop comparing").click()
        await expect(keys).to_have_count(4)
        assert look.errors == []


async def test_the_logs_of_the_sites_are_read_when_they_are_opened(chromium: Browser) -> None:
    board = run_of_three()
    board.apply(Fact(time.time(), "note", B, {"level": 20, "text": "<b>round 7 committed"}))
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#log-of option")).to_have_count(3)
        await look.page.locator("#log summary").click()
        await look.page.locator("#log-of").select_option(B)
        await expect(look.page.locator("#log-lines li").last).to_contain_text("<b>round 7 committed")
        assert look.errors == []


async def test_what_the_model_writes_is_shown_as_text(chromium: Browser) -> None:
    board = run_of_three()
    async with serving(board) as address, looking(chromium, address) as look:
        shown = look.page.locator("#samples li")
        await expect(shown).to_have_count(12)
        await expect(shown.first).to_contain_text("round 60")
        board.apply(Fact(time.time(), "round", A, {"round": 65, "sample": "<b>once</b> upon\na time"}))
        await expect(shown.first).to_have_text(re.compile("^round 65<b>once</b> upon a time$"))
        assert look.errors == []
    async with serving(board, public=True) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#t-round")).to_have_text("65 of 100")
        await expect(look.page.locator("#samples")).to_be_hidden()


async def _saved_csv(page: Page) -> list[str]:
    async with page.expect_download() as saving:
        await page.get_by_label("Save Training loss as CSV").click()
    return _lines(await (await saving.value).path())


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


async def test_the_configuration_is_shown_but_not_where_data_are_to_everybody(chromium: Browser) -> None:
    for public in (False, True):
        async with serving(run_of_three(), public=public) as address, looking(chromium, address) as look:
            await look.page.locator("summary", has_text="Configuration of the run").click()
            shown = look.page.locator("#config")
            await expect(shown).to_contain_text("warmup_steps250")
            await expect(shown.get_by_text("[data]")).to_have_count(0 if public else 1)
            assert look.errors == []


async def test_a_private_page_asks_for_its_token_once(chromium: Browser) -> None:
    async with serving(run_of_three(), viewer_token="viewer-secret") as address, looking(chromium, address) as look:
        page = look.page
        await expect(page.locator("#dialog")).to_contain_text("viewer.token")
        await expect(page.locator("#run-name")).to_have_text("…")
        await page.locator("#token").fill("wrong")
        await page.locator("#dialog-ok").click()
        await expect(page.locator("#dialog-problem")).to_contain_text("neither the viewer's nor the operator's token")
        await page.locator("#token").fill("viewer-secret")
        await page.locator("#dialog-ok").click()
        await expect(page.locator("#dialog")).to_be_hidden()
        await expect(page.locator("#sites tbody tr")).to_have_count(3)
        await page.reload()
        await expect(page.locator("#sites tbody tr")).to_have_count(3)
        await expect(page.locator("#c-speed .keys li")).to_have_count(4)


async def test_the_public_page_shows_the_run_and_no_operator(chromium: Browser) -> None:
    async with serving(run_of_three(), public=True) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#sites tbody tr")).to_have_count(3)
        await expect(look.page.locator("#operator")).to_be_hidden()
        assert "example.org" not in await look.page.content()
        assert look.errors == []


async def test_a_finished_run_says_so_and_what_comes_next(chromium: Browser) -> None:
    board = run_of_three(rounds=99, late=0)
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#t-round")).to_have_text("99 of 100")
        await expect(look.page.locator("#finished")).to_be_hidden()
        board.apply(Fact(time.time(), "round", A, {"round": 100, "compute": 20.0, "validation_loss": 2.125}))
        await expect(look.page.locator("#finished")).to_contain_text("Finished100 rounds")
        await expect(look.page.locator("#finished")).to_contain_text("validation loss 2.125")
        await expect(look.page.locator("#finished")).to_contain_text("pier-node export")
        assert look.errors == []


async def test_a_number_that_is_shown_twice_is_the_same(chromium: Browser) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#c-loss .keys li")).to_have_count(4)
        for title, box in (("t-loss", "c-loss"), ("t-validation", "c-validation"), ("t-speed", "c-speed")):
            tile = await look.page.locator(f"#{title}").inner_text()
            await expect(look.page.locator(f"#{box} .keys b").first).to_have_text(tile)
        for column, box in ((5, "c-speed"), (6, "c-loss")):
            cells = await look.page.locator(f"#sites tbody td:nth-child({column})").all_inner_texts()
            assert await look.page.locator(f"#{box} .keys b").all_inner_texts() == [ANY, *cells]


async def test_the_token_stays_for_this_tab_until_it_is_locked(chromium: Browser) -> None:
    async with serving(run_of_three(), Recorded()) as address, looking(chromium, address) as look:
        page = look.page
        await page.locator("#operator").click()
        await page.locator("#token").fill(TOKEN)
        await page.locator("#dialog-ok").click()
        await expect(page.locator("#operations")).to_be_visible()
        await page.reload()
        await expect(page.locator("#operations")).to_be_visible()
        await page.locator("#operator").click()
        await expect(page.locator("#operations")).to_be_hidden()


async def test_it_fits_a_small_phone(chromium: Browser) -> None:
    board = run_of_three()
    board.apply(Fact(time.time(), "site", A, {"name": "a-very-long-name-without-an-end-" * 2, "address": "x" * 200}))
    board.apply(Fact(time.time(), "note", A, {"level": 30, "text": "y" * 400}))
    async with serving(board, Recorded()) as address, looking(chromium, address, **SMALL) as look:
        await expect(look.page.locator("#sites tbody tr")).to_have_count(3)
        await expect(look.page.locator("#c-speed canvas")).to_be_visible()
        assert await look.number("document.documentElement.scrollWidth") <= 360
        assert look.errors == []


async def test_sites_are_sorted_searched_and_chosen_by_keyboard(chromium: Browser) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address) as look:
        page, first = look.page, look.page.locator("#sites tbody tr").first
        await page.get_by_role("button", name="Tokens/s").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#sites th[aria-sort=descending]")).to_have_text("Tokens/s")
        await expect(first).to_contain_text("lab-c")
        await page.get_by_label("show lab-c in the charts").focus()
        await page.keyboard.press("Space")
        await expect(page.locator("#c-speed .keys li")).to_have_count(3)
        await page.get_by_label("Search sites").fill("catching")
        await expect(page.locator("#sites tbody tr")).to_have_count(1)
        await expect(first).to_contain_text("lab-b")


async def test_among_many_links_those_of_one_site_stand_out(chromium: Browser) -> None:
    board = Replayed(Played(rounds=2, labs=many(20)).facts())
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#map path")).to_have_count(20 * 19)
        await look.page.locator("#map circle").nth(4).hover()
        await expect(look.page.locator("#map path.lit")).to_have_count(2 * 19)
        assert look.errors == []


async def test_rounds_of_long_ago_can_be_seen(chromium: Browser) -> None:
    board = run_of_three()
    for round in range(64, 1001):
        board.apply(Fact(time.time(), "round", B, {"round": round, "compute": 20.0, "exchange": 9.0}))
    async with serving(board) as address, looking(chromium, address) as look:
        page = look.page
        await expect(page.locator("#until-said")).to_have_text("the newest")
        await page.locator("#until").focus()
        await page.keyboard.press("Home")
        await expect(page.locator("#until-said")).to_have_text("round 1")
        await expect(page.locator("#rounds-words")).to_contain_text("A round took")
        await page.locator("#span").select_option("all rounds")
        await expect(page.locator("#rounds-words")).to_contain_text("most often the slowest: lab-b")
        await page.keyboard.press("End")
        assert look.errors == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_texts_have_enough_contrast(chromium: Browser, scheme: str) -> None:
    async with serving(run_of_three()) as address, looking(chromium, address, color_scheme=scheme) as look:
        pairs = [("text", "bg"), ("text", "panel"), ("muted", "bg"), ("muted", "panel"), ("muted", "warn-bg")]
        pairs += [("warn", "panel"), ("bad", "panel"), ("warn", "warn-bg"), ("bad", "bad-bg"), ("on-accent", "accent")]
        pairs += [("muted", "raised"), ("bad", "raised"), ("text", "raised"), ("muted", "bad-bg")]
        for front, back in pairs:
            assert await look.number(CONTRAST % (front, back)) >= 4.5, (front, back)


CONTRAST = """(() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim();
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((it) => (it <= 0.03928 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [one, other] = [light('--%s'), light('--%s')];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
})()"""


async def test_an_empty_run_says_that_nobody_has_come(chromium: Browser) -> None:
    board = ReadModel()
    board.apply(Fact(1.0, "run", "", {"name": "atlantic", "sites": 3}))
    async with serving(board) as address, looking(chromium, address) as look:
        await expect(look.page.locator("#no-sites")).to_have_text(
            "No site has come yet: pier-coordinator invite lets one in."
        )
        await expect(look.page.locator("#t-sites")).to_have_text("0 of 3")
        for chart in ("#c-loss", "#c-validation", "#c-speed"):
            await expect(look.page.locator(f"{chart} canvas")).to_be_hidden()
            await expect(look.page.locator(f"{chart} .empty")).to_have_text("Nothing measured yet.")
        await expect(look.page.locator("#rounds-words")).to_have_text("No rounds yet.")
        assert look.errors == []
