"""Who may do what on the page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from coordinator.page_cases import SIGNED, TOKEN, Recorded, serving

from pier_coordinator.cli import start
from pier_coordinator.page.guard import Guard
from pier_coordinator.runs.read_model import ReadModel


@pytest.fixture
async def actions() -> Recorded:
    return Recorded()


@pytest.fixture
async def page(actions: Recorded) -> AsyncIterator[str]:
    async with serving(ReadModel(), actions, hosts=["pier.example.org"]) as address:
        yield f"{address}/api/actions"


async def post(address: str, headers: dict[str, str] = SIGNED, **more: Any) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(address, headers=headers, **more) as answer:
        told = await answer.json() if answer.content_type == "application/json" else {"error": await answer.text()}
        return answer.status, told


@pytest.mark.parametrize(
    ("action", "body", "asked"),
    [
        ("pause", {"nodes": ["a", "b"]}, ("pause", ["a", "b"])),
        ("resume", {"nodes": []}, ("resume", [])),
        ("stop", {"nodes": ["a"]}, ("stop", ["a"])),
        ("revoke", {"node": "a"}, ("revoke", "a")),
        ("assign", {"node": "a", "kind": "replica"}, ("assign", "a", "replica", None)),
        ("assign", {"node": "a", "kind": "stage", "stage": 2}, ("assign", "a", "stage", 2)),
        ("invite", {"name": "lab-d", "expires_seconds": 60, "uses": 2}, ("invite", "lab-d", 60.0, 2)),
        ("experts", {"plan": "ab" * 16}, ("experts", "ab" * 16)),
        ("invite", {}, ("invite", "", 86400.0, 1)),
    ],
)
async def test_the_operator_s_wish_is_done(page: str, actions: Recorded, action: str, body: Any, asked: Any) -> None:
    status, told = await post(f"{page}/{action}", json=body)
    assert status == 200
    assert actions.asked == [asked]
    assert told == {"ok": True} if action != "invite" else "PIER_TOKEN=" in told["command"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer ünïcode"},
    ],
)
async def test_nobody_else_s_is(page: str, actions: Recorded, headers: dict[str, str]) -> None:
    status, told = await post(f"{page}/stop", headers, json={"nodes": []})
    assert (status, actions.asked) == (401, [])
    assert told["error"] == "that is not the operator's token"


async def test_a_token_can_be_tried_without_doing_anything(page: str, actions: Recorded) -> None:
    assert (await post(f"{page}/check", json={}))[0] == 200
    assert (await post(f"{page}/check", {}, json={}))[0] == 401
    assert actions.asked == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("LOCALHOST:8080", 200),
        ("pier.example.org", 200),
        ("evil.example.org:8080", 403),
        ("127.0.0.1.evil.example.org", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_a_name_that_is_not_ours_is_refused(page: str, host: str, status: int) -> None:
    got, told = await post(f"{page}/pause", {**SIGNED, "Host": host}, json={"nodes": []})
    assert got == status or (host in ("[::1", "") and got == 400), told


async def test_another_page_s_request_is_refused(page: str, actions: Recorded) -> None:
    status, told = await post(f"{page}/pause", {**SIGNED, "Origin": "https://evil.example.org"}, json={"nodes": []})
    assert (status, actions.asked) == (403, [])
    named = re.search(r"pier-coordinator start (--\w+)", told["error"])
    assert named
    assert named[1] in {option for parameter in start.params for option in parameter.opts}


@pytest.mark.parametrize("host", ["pier.example.org", "127.0.0.1:7780"])
async def test_the_page_acts_behind_a_proxy_whatever_host_that_sends(page: str, actions: Recorded, host: str) -> None:
    headers = {**SIGNED, "Host": host, "Origin": "https://pier.example.org"}
    status, told = await post(f"{page}/pause", headers, json={"nodes": []})
    assert (status, actions.asked) == (200, [("pause", [])]), told


@pytest.mark.parametrize("path", ["", "healthz", "metrics", "api/board", "api/stream", "static/index.html"])
async def test_nothing_is_read_under_a_name_that_is_not_ours(page: str, path: str) -> None:
    address = page.removesuffix("api/actions") + path
    async with aiohttp.ClientSession() as session:
        async with session.get(address, headers={"Host": "evil.example.org"}) as answer:
            assert answer.status == 403
            assert "pier-coordinator start --host evil.example.org" in await answer.text()
        async with session.get(address, headers={"Host": "pier.example.org"}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("action", "body", "problem"),
    [
        ("pause", [], "must be a JSON object"),
        ("pause", {}, "nodes: must be a list"),
        ("pause", {"nodes": "all"}, "nodes: must be a list"),
        ("pause", {"nodes": [1]}, "nodes: must be a list"),
        ("pause", {"nodes": [""]}, "nodes: must be a list"),
        ("revoke", {"node": "x" * 129}, "node: must be a node id"),
        ("assign", {"node": "a", "kind": "emperor"}, "kind: must be one of: replica, stage"),
        ("assign", {"node": "a", "kind": "stage"}, "stage: must be the number of a stage"),
        ("assign", {"node": "a", "kind": "stage", "stage": True}, "stage: must be the number of a stage"),
        ("assign", {"node": "a", "kind": "stage", "stage": 1024}, "stage: must be the number of a stage"),
        ("experts", {"plan": "ab"}, "plan: must be the id of a plan"),
        ("invite", {"name": "x" * 65}, "name: must be a text"),
        ("invite", {"name": 5}, "name: must be a text"),
        ("invite", {"expires_seconds": 0}, "expires_seconds: must be"),
        ("invite", {"expires_seconds": True}, "expires_seconds: must be"),
        ("invite", {"uses": 0}, "uses: must be a whole number"),
        ("invite", {"uses": 1.5}, "uses: must be a whole number"),
    ],
)
async def test_a_bad_body_is_told_what_is_wrong(
    page: str, actions: Recorded, action: str, body: Any, problem: str
) -> None:
    status, told = await post(f"{page}/{action}", json=body)
    assert (status, actions.asked) == (400, [])
    assert problem in told["error"]


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, "\x00"])
async def test_a_body_that_is_no_json_is_refused(page: str, text: str) -> None:
    headers = {**SIGNED, "Content-Type": "application/json"}
    status, told = await post(f"{page}/pause", headers, data=text.encode())
    assert status == 400
    assert told["error"].startswith("the body is not JSON")


async def test_a_form_is_no_json(page: str) -> None:
    assert (await post(f"{page}/pause", data={"nodes": "[]"}))[0] == 400


async def test_a_large_body_is_not_read(page: str) -> None:
    assert (await post(f"{page}/pause", json={"nodes": ["x" * 100] * 1000}))[0] == 413


async def test_why_an_action_cannot_be_done_is_told(page: str) -> None:
    assert await post(f"{page}/revoke", json={"node": "never"}) == (409, {"error": "no site is called never"})


async def test_actions_are_never_done_by_looking(page: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{page}/stop", headers=SIGNED) as answer:
        assert answer.status == 405


def test_an_empty_token_opens_nothing() -> None:
    request = make_mocked_request("POST", "/", headers={"Authorization": "Bearer ", "Host": "127.0.0.1"})
    with pytest.raises(web.HTTPUnauthorized):
        Guard("", []).check(request)


async def test_how_far_the_experts_are_is_told(page: str, actions: Recorded) -> None:
    assert await post(f"{page}/experts-told", json={}) == (200, {"plan": None, "experts": []})
    assert actions.asked == [("experts-told",)]
