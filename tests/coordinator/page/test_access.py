"""Who may look at the page: everybody, who has a token, or everybody without what is private."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from coordinator.page_cases import TOKEN, Recorded, serving
from coordinator.played import LABS, Played, Replayed, node

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

VIEWER = "viewer-secret"
READ = (
    *("/api/board", "/api/nodes", "/api/events", "/api/curves", "/api/rounds", "/api/links", "/api/pipeline"),
    *("/api/pipeline/chart.svg", "/api/stream", "/metrics", "/api/log"),
)
PRIVATE = ("example.org", "secret", "/home/alice")


def board() -> ReadModel:
    made, name = Replayed(Played(rounds=3).facts()), node(LABS[0].name)
    end = Played(rounds=3).end
    made.apply(Fact(end, "note", name, {"level": 40, "text": "cannot write /home/alice/run at b.example.org:7700"}))
    made.apply(Fact(end, "event", "", {"level": 20, "text": "invite secret was made for lab-d"}))
    return made


async def ask(address: str, method: str = "GET", **more: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.request(method, address, **more) as answer:
        text = "" if answer.content_type == "text/event-stream" else await answer.text()
        return answer.status, text


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("path", READ)
async def test_a_private_page_is_read_with_a_token_only(path: str) -> None:
    async with serving(board(), viewer_token=VIEWER) as page:
        for headers in (
            {},
            bearer("wrong"),
            bearer(""),
            {"Cookie": "pier-viewer="},
            {"Cookie": f"pier-viewer={VIEWER}"},
        ):
            assert (await ask(page + path, headers=headers))[0] == 401
        for token in (VIEWER, TOKEN):
            assert (await ask(page + path, headers=bearer(token)))[0] in (200, 404)


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/healthz"])
async def test_what_tells_nothing_of_the_run_is_open(path: str) -> None:
    async with serving(board(), viewer_token=VIEWER) as page:
        assert (await ask(page + path))[0] == 200


async def test_a_browser_gets_a_cookie_that_lets_it_look_but_not_act() -> None:
    actions = Recorded()
    async with (
        serving(board(), actions, viewer_token=VIEWER) as page,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        async with session.post(f"{page}/api/login", headers=bearer("wrong")) as answer:
            assert (answer.status, "Set-Cookie" in answer.headers) == (401, False)
        async with session.post(f"{page}/api/login", headers=bearer(VIEWER)) as answer:
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert VIEWER not in cookie
        async with session.get(f"{page}/api/board") as answer:
            assert answer.status == 200
        for headers in ({}, bearer(VIEWER)):
            async with session.post(f"{page}/api/actions/stop", json={"nodes": []}, headers=headers) as answer:
                assert (answer.status, actions.asked) == (401, [])


async def test_another_page_cannot_log_in() -> None:
    headers = {**bearer(VIEWER), "Origin": "https://evil.example.org"}
    async with serving(board(), viewer_token=VIEWER) as page:
        assert (await ask(f"{page}/api/login", "POST", headers=headers))[0] == 403


async def test_behind_https_the_cookie_is_sent_encrypted_only() -> None:
    headers = {**bearer(VIEWER), "Origin": "https://pier.example.org"}
    async with (
        serving(board(), viewer_token=VIEWER, hosts=["pier.example.org"]) as page,
        aiohttp.ClientSession() as session,
        session.post(f"{page}/api/login", headers=headers) as answer,
    ):
        assert "Secure" in answer.headers["Set-Cookie"]


async def test_the_public_page_has_no_actions_and_nothing_private() -> None:
    async with serving(board()) as page:
        told = "".join([(await ask(page + path))[1] for path in READ if path != "/api/stream"])
        assert all(word in told for word in PRIVATE)
    async with serving(board(), public=True) as page:
        told = "".join([(await ask(page + path))[1] for path in READ if path != "/api/stream"])
        assert "lab-a" in told
        assert [word for word in PRIVATE if word in told] == []
        async with aiohttp.ClientSession(read_bufsize=2**22) as session, session.get(f"{page}/api/stream") as answer:
            line = b""
            while not line.startswith(b"data: "):
                line = await answer.content.readuntil(b"\n")
        assert json.loads(line.removeprefix(b"data: "))["public"]
        assert [word for word in PRIVATE if word.encode() in line] == []
        for path in ("/api/actions/stop", "/api/actions/check", "/api/login"):
            assert (await ask(page + path, "POST", json={}, headers=bearer(TOKEN)))[0] in (404, 405)
        for path in ("/metrics", "/api/log"):
            assert (await ask(page + path))[0] == 404
