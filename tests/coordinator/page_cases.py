"""A page over a real socket, and somebody who takes down what the operator wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from coordinator.cases import PATIENCE

from pier_coordinator.page.access import Access
from pier_coordinator.page.actions import Operator
from pier_coordinator.page.app import Health, make_app, make_public_app
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.sites import Activity, Refused

TOKEN = "operator-secret"
SIGNED = {"Authorization": f"Bearer {TOKEN}"}


class Recorded(Operator):
    """Actions that only write down what they were asked; those on the site "never" are refused."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.came = asyncio.Event()

    def _take(self, *what: Any) -> None:
        if "never" in what:
            raise Refused("no site is called never")
        self.asked.append(what)
        self.came.set()

    async def order(self, activity: Activity, nodes: list[str]) -> None:
        self._take(activity, nodes)

    async def revoke(self, node: str) -> dict[str, Any]:
        self._take("revoke", node)
        return {}

    async def invite(self, name: str, expires_seconds: float, uses: int) -> dict[str, Any]:
        self._take("invite", name, expires_seconds, uses)
        return {"command": "pier-node start --coordinator host:7700", "token": "pierinvite1-x"}

    async def assign(self, node: str, kind: str, stage: int | None) -> None:
        self._take("assign", node, kind, stage)

    async def experts(self, plan: str) -> None:
        self._take("experts", plan)

    async def experts_told(self) -> dict[str, Any]:
        self._take("experts-told")
        return {"plan": None, "experts": []}

    async def evaluate(self, domains: list[Any], rows: int, patience: float) -> None:
        self._take("evaluate", domains, rows, patience)

    async def evaluation(self) -> dict[str, Any]:
        self._take("evaluation")
        return {}


@asynccontextmanager
async def serving(
    board: ReadModel,
    actions: Recorded | None = None,
    port: int = 0,
    hosts: Collection[str] = (),
    health: Health = lambda: {"ok": True},
    viewer_token: str = "",
    public: bool = False,
) -> AsyncIterator[str]:
    """The address of the board's page, or of its public page."""
    access = Access(TOKEN, hosts, viewer_token)
    app = make_public_app(board, health, hosts) if public else make_app(board, actions or Recorded(), access, health)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Events:
    """Reads server-sent events."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.id = ""

    async def next(self) -> dict[str, Any]:
        """The next one's data."""
        async with asyncio.timeout(PATIENCE):
            while True:
                key, _, value = (await self.line()).partition(": ")
                if key == "id":
                    self.id = value
                if key == "data":
                    told = json.loads(value)
                    assert isinstance(told, dict)
                    return told

    async def line(self) -> str:
        """The next line, of whatever kind."""
        return (await self._answer.content.readuntil(b"\n")).decode().rstrip("\n")


@asynccontextmanager
async def watching(address: str, last: str = "") -> AsyncIterator[Events]:
    """Somebody who watches; with `last`, who comes back."""
    headers = {"Last-Event-ID": last} if last else {}
    async with (
        aiohttp.ClientSession(read_bufsize=2**22) as session,
        session.get(f"{address}/api/stream", headers=headers) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        yield Events(answer)
