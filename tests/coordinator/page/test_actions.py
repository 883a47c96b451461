"""The operator's actions, over a real socket and on a coordinator that runs."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from coordinator.cases import ALICE, BOB, CAROL, CONFIG, Running, Ticket, running
from coordinator.expert_cases import accepted_job, accepted_plan
from coordinator.page_cases import SIGNED, TOKEN, Recorded, serving
from grpc.aio import AioRpcError

from pier_coordinator.cli import start
from pier_coordinator.commands.start import init
from pier_coordinator.identity.home import PLAN_FILE, Home
from pier_coordinator.page.access import Access
from pier_coordinator.page.actions import Operator
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.sites import Refused
from pier_node.config.run import PipelineSection
from pier_proto.v1.peer_pb2 import Place


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
        ("resume", {"nodes": []}, ("train", [])),
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
    assert told == {"ok": True} if action != "invite" else told["token"] not in told["command"]


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


async def test_an_action_that_cannot_be_stored_is_told(actions: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(actions, "order", full)
    async with serving(ReadModel(), actions) as address:
        told = await post(f"{address}/api/actions/pause", json={"nodes": []})
    assert told == (503, {"error": "nothing can be stored: database or disk is full"})


async def test_actions_are_never_done_by_looking(page: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{page}/stop", headers=SIGNED) as answer:
        assert answer.status == 405


def test_an_empty_token_opens_nothing() -> None:
    request = make_mocked_request("POST", "/", headers={"Authorization": "Bearer ", "Host": "127.0.0.1"})
    with pytest.raises(web.HTTPUnauthorized):
        Access("").check_action(request)


async def test_how_far_the_experts_are_is_told(page: str, actions: Recorded) -> None:
    assert await post(f"{page}/experts-told", json={}) == (200, {"plan": None, "experts": []})
    assert actions.asked == [("experts-told",)]


STAGED = CONFIG.model_copy(update={"pipeline": PipelineSection(stages=3)})


def operator(run: Running, folder: Path) -> Operator:
    init(folder, "llama-tiny")
    return Operator(run.coordinator, Home.found(folder), "10.0.0.9:7790")


async def test_of_an_invite_that_is_taken_back_it_is_told_who_came_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        await run.let_in(ALICE)
        unused = (await operates.invite("lab-b", 3600.0, 1))["id"]
        assert await operates.revoke(unused) == {"invite": unused, "sites": []}
        used = f"for-{ALICE.node}"
        assert await operates.revoke(used) == {"invite": used, "sites": ["lab-0"]}
        assert run.coordinator.sites[ALICE.node].revoked_at is None
        assert await operates.revoke("lab-0") == {"site": "lab-0", "invite": "", "sites": []}
        assert await operates.revoke(used) == {"invite": used, "sites": []}


async def test_of_two_who_revoke_a_site_at_once_one_is_told_that_it_was_revoked(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        await run.let_in(ALICE)
        first, second = await asyncio.gather(*(operates.revoke("lab-0") for _ in range(2)), return_exceptions=True)
    assert first == {"site": "lab-0", "invite": "", "sites": []}
    assert isinstance(second, Refused)
    assert str(second).endswith("was revoked by the run's operator")


async def test_a_revoked_site_does_not_come_back_with_the_invite_of_many(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates, ticket = operator(run, tmp_path / "my-run"), Ticket.make("for-all")
        await run.coordinator.invite(ticket.row(uses=5))
        async with run.caller(ticket.credentials) as caller:
            for number, site in enumerate((ALICE, BOB)):
                await caller.enrol(ticket.request(site, name=f"lab-{number}"))
            assert await operates.revoke("lab-0") == {"site": "lab-0", "invite": "for-all", "sites": ["lab-1"]}
            with pytest.raises(AioRpcError, match="this invite was revoked"):
                await caller.enrol(ticket.request(CAROL, name="lab-0 again"))
        assert "invite for-all was revoked with lab-0, which came in with it" in [
            fact.body.get("text") for fact in run.told
        ]
        assert await operates.revoke("lab-1") == {"site": "lab-1", "invite": "", "sites": []}


async def test_a_name_with_a_space_stays_one_word_in_the_command(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        command = (await operator(run, tmp_path / "my-run").invite("lab b", 3600.0, 1))["command"]
        assert command.endswith(" --name 'lab b'")


async def test_a_stage_is_for_a_site_that_holds_none(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates, run.coordinator.config = operator(run, tmp_path / "my-run"), STAGED
        await run.let_in(ALICE)
        await operates.assign("lab-0", "stage", 2)
        assert run.coordinator.orders[ALICE.node].assignment == {"stage": {"number": 2}}
        with pytest.raises(Refused, match="this run has 3 stages, numbered from 0: there is no stage 3"):
            await operates.assign("lab-0", "stage", 3)
        with pytest.raises(Refused, match="nobody"):
            await operates.assign("nobody", "stage", 1)
        async with run.site(ALICE) as site:
            lease = (await site.register(ALICE)).lease
            await site.beat(ALICE, lease, place=Place(stage=2))
        await operates.assign("lab-0", "stage", 2)
        with pytest.raises(Refused, match="lab-0 holds stage 2: to give it another, start it with a new data folder"):
            await operates.assign("lab-0", "stage", 1)
        await operates.assign("lab-0", "replica", None)


async def test_there_is_one_open_invite_to_a_name(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        for _ in range(2):
            await operates.invite("", 3600.0, 1)
        first = (await operates.invite("lab-b", 3600.0, 1))["id"]
        with pytest.raises(Refused, match=rf"give another --name, or .* \(pier-coordinator revoke {first}\)"):
            await operates.invite("lab-b", 3600.0, 1)
        await operates.revoke(first)
        await operates.invite("lab-b", 3600.0, 1)
        run.wall.now += 3601.0
        await operates.invite("lab-b", 3600.0, 1)


async def test_the_plan_in_the_folder_is_started_if_it_is_the_one_that_was_meant(tmp_path: Path) -> None:
    plan = accepted_plan(accepted_job(0, "lab-0"), sites=("lab-0",))
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        await run.let_in(ALICE)
        with pytest.raises(Refused, match=r"experts\.json in the folder of the run is no plan"):
            await operates.experts(plan.id)
        (tmp_path / "my-run" / PLAN_FILE).write_text(plan.model_dump_json(indent=1))
        with pytest.raises(Refused, match="is another plan"):
            await operates.experts("f" * 32)
        assert (await operates.experts_told())["plan"] is None
        await operates.experts(plan.id)
        told = await operates.experts_told()
    assert (told["plan"], [row["site"] for row in told["experts"]]) == (plan.id, ["lab-0"])
