"""Reading the page's interface over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from coordinator.page_cases import serving
from coordinator.played import LABS, Played, Replayed, node

from pier_coordinator.page.app import STATIC
from pier_coordinator.runs.pipeline import Drawing
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

A = node(LABS[0].name)


def board() -> ReadModel:
    return Replayed(Played(rounds=25).facts())


@pytest.fixture
async def page() -> AsyncIterator[str]:
    async with serving(board()) as address:
        yield address


async def get(address: str, **more: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(address, **more) as answer:
        told = await (answer.json() if answer.content_type == "application/json" else answer.text())
        return answer.status, told


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/static/style.css", "/static/vendor/uPlot.iife.min.js"])
async def test_the_page_and_its_parts_are_served_with_safe_headers(page: str, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(page + path) as answer:
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache"


async def test_errors_have_the_headers_too(page: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{page}/nowhere") as answer:
        assert answer.status == 404
        assert "Content-Security-Policy" in answer.headers


async def test_nothing_on_the_page_comes_from_elsewhere_or_is_inline(page: str) -> None:
    _, html = await get(page)
    assert "http" not in html
    assert "style=" not in html
    assert "onclick" not in html


async def test_no_script_makes_html_of_text(page: str) -> None:
    names = sorted(path.stem for path in STATIC.glob("*.js"))
    assert "main" in names
    for name in names:
        _, script = await get(f"{page}/static/{name}.js")
        assert "innerHTML" not in script
        assert "insertAdjacentHTML" not in script
        assert "http://" not in script.replace("http://www.w3.org/2000/svg", "")


async def test_the_board_is_all_of_it(page: str) -> None:
    status, told = await get(f"{page}/api/board")
    assert status == 200
    assert told["full"]
    assert [site["name"] for site in told["sites"]] == ["lab-a", "lab-b", "lab-c"]
    assert told["alerts"] == []


async def test_nodes_are_the_table_s_rows(page: str) -> None:
    _, told = await get(f"{page}/api/nodes")
    assert [site["round"] for site in told["sites"]] == [25, 25, 25]


async def test_the_log_of_a_site_is_told_but_not_to_everybody() -> None:
    made = board()
    made.apply(Fact(Played().end, "note", A, {"level": 20, "text": "<i>hello"}))
    async with serving(made) as page:
        assert (await get(f"{page}/api/log?node={A}"))[1]["lines"][-1]["text"] == "<i>hello"
        assert (await get(f"{page}/api/log?node=nobody"))[1]["lines"] == []


async def test_events_come_in_pages() -> None:
    made = board()
    for number in range(1000, 1010):
        made.apply(Fact(Played().end, "note", A, {"level": 30, "text": str(number)}, number))
    async with serving(made) as page:
        texts = [
            [event["text"] for event in (await get(f"{page}/api/events{query}"))[1]["events"]]
            for query in ("?limit=2", "?after=1001&limit=3", "?after=1009")
        ]
    assert texts == [["1008", "1009"], ["1002", "1003", "1004"], []]


async def test_curves_rounds_and_links_are_told_when_asked_for(page: str) -> None:
    _, curves = await get(f"{page}/api/curves?nodes={A},nobody")
    assert list(curves["curves"]) == [A]
    _, rest = await get(f"{page}/api/curves?nodes={A}&since={curves['stamp']}")
    assert rest["curves"][A]["loss"]["x"] == []
    _, rounds = await get(f"{page}/api/rounds?first=20&last=22&nodes={A}")
    assert [segment[0] for segment in rounds["sites"][0]["segments"]] == [20, 21, 22]
    _, links = await get(f"{page}/api/links?node={A}")
    assert len(links["links"]) == 4


@pytest.mark.parametrize(
    "query", ["events?after=-1", "events?limit=x", "rounds?first=1e9", "curves?since=9999999999999999"]
)
async def test_a_question_that_makes_no_sense_is_told_so(page: str, query: str) -> None:
    status, told = await get(f"{page}/api/{query}")
    assert status == 400
    assert "must be a whole number" in told["error"]


async def test_healthz_says_what_it_was_told() -> None:
    health: dict[str, Any] = {}
    async with serving(ReadModel(), health=lambda: health) as page:
        for told, status in (({"ok": True, "sites": 3}, 200), ({"ok": False, "problem": "disk full"}, 503)):
            health.clear()
            health.update(told)
            assert await get(f"{page}/healthz") == (status, told)


async def test_what_a_site_says_is_only_text() -> None:
    made = board()
    made.apply(Fact(Played().end, "note", A, {"level": 30, "text": "<script>alert(1)</script>"}))
    async with serving(made) as page:
        status, told = await get(f"{page}/api/events?limit=1")
    assert status == 200
    assert told["events"][0]["text"] == "<script>alert(1)</script>"


async def test_a_pipeline_is_what_its_live_sites_measured_and_a_picture() -> None:
    made, there = Replayed(), {"stage": 0, "memory": 2, "forward": 0.5, "backward": 1.0, "loss": 0.1}
    made.pulse(A, {"phase": "PHASE_TRAINING", "place": {**there, "transfer": {"bb" * 8: 0.25}}}, alive=True)
    made.pulse("bb" * 8, {"place": there}, alive=True)
    made.pulse("bb" * 8, {}, alive=False)
    async with serving(made) as address:
        assert await get(f"{address}/api/pipeline/chart.svg") == (404, "no paths yet")
        status, told = await get(f"{address}/api/pipeline")
        assert (status, told["plan"], told["step_seconds"]) == (200, None, None)
        (found,) = told["sites"]
        assert found == {"node": A, "name": A[:12], **there, "transfer": {"bb" * 8: 0.25}, "round_trip": {}}
        made.drawn(Drawing(7, "some", 12.5, [[A]], {A: 1.0}, "<svg/>"))
        assert (await get(f"{address}/api/pipeline"))[1]["plan"]["seconds"] == 12.5
        async with aiohttp.ClientSession() as session, session.get(f"{address}/api/pipeline/chart.svg") as answer:
            assert (answer.content_type, await answer.text()) == ("image/svg+xml", "<svg/>")
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
