"""The status page, over a real socket."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from pier_node.base.errors import PierError
from pier_node.site.report import METRICS, StatusServer, finite

STATUS: dict[str, Any] = {
    "run": "try",
    "name": "lab-a",
    "phase": "training",
    "round": 7,
    "loss": math.nan,
    "peers": [{"node": "b", "round_trip": math.inf}],
    **{name: 1.5 for name in METRICS if name not in ("round", "loss")},
}


@pytest.fixture
async def page() -> AsyncIterator[str]:
    server = StatusServer(lambda: STATUS)
    port = await server.start(0)
    yield f"http://127.0.0.1:{port}"
    await server.stop()


async def get(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_healthz(page: str) -> None:
    assert await get(f"{page}/healthz") == '{"ok": true, "phase": "training"}'


async def test_a_port_in_use_is_said(page: str) -> None:
    port = int(page.rpartition(":")[2])
    with pytest.raises(PierError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use") as error:
        await StatusServer(lambda: STATUS).start(port)
    assert "--http" in error.value.remedy


async def test_json_has_null_for_what_is_not_known(page: str) -> None:
    text = await get(f"{page}/status")
    assert '"loss": null' in text
    assert '"round_trip": null' in text
    assert "NaN" not in text


@pytest.mark.parametrize("path", ["healthz", "status", "metrics"])
async def test_nothing_is_told_under_a_name_that_is_not_ours(page: str, path: str) -> None:
    evil = {"Host": "evil.example.org"}
    async with aiohttp.ClientSession() as session, session.get(f"{page}/{path}", headers=evil) as answer:
        assert answer.status == 403


async def test_metrics_name_run_and_site(page: str) -> None:
    text = await get(f"{page}/metrics")
    assert 'pier_round{run="try",site="lab-a"} 7.0' in text
    assert 'pier_loss{run="try",site="lab-a"} NaN' in text
    assert all(f"# HELP pier_{name} " in text for name in METRICS)


@pytest.mark.parametrize("method", ["post", "put", "delete"])
async def test_nothing_can_be_changed(page: str, method: str) -> None:
    async with aiohttp.ClientSession() as session, session.request(method, f"{page}/status") as answer:
        assert answer.status == 405


async def test_it_listens_on_this_machine_only(page: str) -> None:
    assert page.startswith("http://127.0.0.1:")


def test_finite_reaches_into_lists_and_tables() -> None:
    assert finite({"a": [1.0, math.nan, {"b": -math.inf}], "c": "nan"}) == {"a": [1.0, None, {"b": None}], "c": "nan"}
