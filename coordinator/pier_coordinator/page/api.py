"""The read API: everything that the page and the command line read, as JSON and without a login."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from pier_coordinator.page.guard import bad
from pier_coordinator.runs.alerts import Watch
from pier_coordinator.runs.read_model import EVENTS, ReadModel

MOST_CURVES = 16
MOST_LINKS = 2000


class Api:
    """Answers requests from a board."""

    def __init__(self, board: ReadModel, watch: Watch, health: Any) -> None:
        self._board, self._watch, self._health = board, watch, health

    async def healthz(self, _request: web.Request) -> web.Response:
        """GET /healthz: 200 if the coordinator works, else 503."""
        health = self._health()
        return web.json_response(health, status=200 if health["ok"] else 503)

    async def board(self, _request: web.Request) -> web.Response:
        """The whole board, with which the page begins."""
        return compressed({**self._board.snapshot(), "alerts": self._watch.told(self._board)})

    async def nodes(self, _request: web.Request) -> web.Response:
        """The table of sites."""
        self._board.refresh()
        return compressed({"sites": [self._board.row(site) for site in self._board.sites.values()]})

    async def events(self, request: web.Request) -> web.Response:
        """?after=NUMBER&limit=COUNT: the first COUNT events stored after NUMBER; without `after`, the last COUNT."""
        after, limit = _whole(request, "after", 0), _whole(request, "limit", EVENTS)
        events = self._board.events(after=after)
        later = sorted(events, key=lambda event: event["number"])[:limit]
        return web.json_response({"events": later if after else events[max(0, len(events) - limit) :]})

    async def curves(self, request: web.Request) -> web.Response:
        """?nodes=A,B&since=STAMP: the curves of some sites."""
        nodes, since = _nodes(request), _whole(request, "since", 0)
        stamp = self._board.stamp
        return compressed({"stamp": stamp, "boot": self._board.boot, "curves": self._board.curves_of(nodes, since)})

    async def rounds(self, request: web.Request) -> web.Response:
        """?first=ROUND&last=ROUND&nodes=A,B: how the sites spent their time."""
        first, last = _whole(request, "first", 1), _whole(request, "last", self._board.round)
        return compressed(self._board.rounds_of(first, last, _nodes(request)))

    async def links(self, request: web.Request) -> web.Response:
        """?node=A: the links from and to a site; without `node`, all links, up to a limit."""
        node = request.query.get("node")
        return compressed({"links": self._board.links.rows(node=node or None, most=MOST_LINKS)})

    async def pipeline(self, _request: web.Request) -> web.Response:
        """What the live sites of a pipeline hold and have measured, the paths in use, and the duration of a step."""
        self._board.refresh()
        live, rows = {site.node: site.name for site in self._board.live()}, self._board.pipeline
        return compressed({"sites": rows.measured(live), "plan": rows.plan(), "step_seconds": rows.step_seconds()})

    async def chart(self, _request: web.Request) -> web.Response:
        """The schedule of the paths in use, as an SVG picture."""
        drawing = self._board.pipeline.drawing
        if drawing is None:
            raise web.HTTPNotFound(text="no paths yet")
        answer = web.Response(text=drawing.svg, content_type="image/svg+xml")
        answer.enable_compression()
        return answer


def compressed(told: dict[str, Any]) -> web.Response:
    """A JSON response, compressed if the browser accepts it."""
    answer = web.Response(text=dumps(told), content_type="application/json")
    answer.enable_compression()
    return answer


def dumps(told: dict[str, Any]) -> str:
    """JSON without spaces and without NaN, which browsers reject."""
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def _whole(request: web.Request, key: str, default: int) -> int:
    value = request.query.get(key, str(default))
    if not (value.isascii() and value.isdigit()) or len(value) > 15:
        raise bad(f"{key}: must be a whole number")
    return int(value)


def _nodes(request: web.Request) -> list[str]:
    return [node for node in request.query.get("nodes", "").split(",") if node][:MOST_CURVES]
