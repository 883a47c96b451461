"""The web application of the page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

from aiohttp import web

from pier_coordinator.page.actions import Actions, action_routes
from pier_coordinator.page.api import Api
from pier_coordinator.page.guard import Guard
from pier_coordinator.page.metrics import Metrics
from pier_coordinator.page.stream import Stream
from pier_coordinator.runs.alerts import Watch
from pier_coordinator.runs.read_model import ReadModel
from pier_node.base.http import add_headers, under_known_names

STATIC = Path(__file__).parent / "static"
LARGEST_BODY = 16 * 1024

Health = Callable[[], dict[str, Any]]


def make_app(
    board: ReadModel,
    actions: Actions,
    operator_token: str,
    health: Health,
    hosts: Collection[str] = (),
) -> web.Application:
    """Make the web application for a board.

    Args:
        actions: the operator's actions.
        operator_token: the token that actions need, as `Authorization: Bearer TOKEN`.
        health: the answer to /healthz; if its "ok" is false, the status is 503.
        hosts: names of the page besides addresses, localhost and this machine's name: NAME, or NAME:PORT behind a
            proxy on an unusual port. Requests under other names are refused (DNS rebinding).
    """
    watch = Watch()
    stream, api = Stream(board, watch), Api(board, watch, health)
    remedy = "; if it is, start the coordinator with it: pier-coordinator start --host {}"
    app = web.Application(client_max_size=LARGEST_BODY, middlewares=[under_known_names(hosts, remedy)])
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_running(stream))
    app.on_shutdown.append(stream.close)
    app.add_routes(
        [
            web.get("/", _index),
            web.static("/static", STATIC),
            web.get("/healthz", api.healthz),
            web.get("/metrics", Metrics(board).answer),
            web.get("/api/board", api.board),
            web.get("/api/nodes", api.nodes),
            web.get("/api/events", api.events),
            web.get("/api/curves", api.curves),
            web.get("/api/rounds", api.rounds),
            web.get("/api/links", api.links),
            web.get("/api/pipeline", api.pipeline),
            web.get("/api/pipeline/chart.svg", api.chart),
            web.get("/api/stream", stream.answer),
            *action_routes(actions, Guard(operator_token, hosts)),
        ]
    )
    return app


async def _index(_request: web.Request) -> web.StreamResponse:
    return web.FileResponse(STATIC / "index.html")


def _running(stream: Stream) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(_app: web.Application) -> AsyncIterator[None]:
        stream.start()
        yield
        await stream.stop()

    return context
