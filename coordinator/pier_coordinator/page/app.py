"""The web application of the page: the read API, as JSON, and the stream of what changes.

Server-sent events tell open pages what changed, at most twice a second. An event's id is BOOT-STAMP. A browser that
reconnects with an id gets what has changed since, or everything if the board is a new one (the coordinator was
restarted). Slow readers miss ticks but no changes.

/metrics is for Prometheus: totals of the run, and each site by name.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pier_coordinator.page.access import Access, public_board, public_events, public_site
from pier_coordinator.page.actions import Operator, action_routes, bad
from pier_coordinator.runs.alerts import Watch
from pier_coordinator.runs.read_model import EVENTS, ReadModel
from pier_coordinator.runs.sites import GONE, Site
from pier_node.base.http import add_headers, under_known_names
from pier_node.base.tasks import cancel_and_wait

STATIC = Path(__file__).parent / "static"
LARGEST_BODY = 16 * 1024
MOST_CURVES = 16
MOST_LINKS = 2000
TICK = 0.5
SITES_A_SECOND = 250
"""Minimum seconds between two ticks, and maximum sites sent per second: with 1,000 sites, a tick comes every 4 s."""
HEARTBEAT = 15.0
"""Seconds without an event after which a comment shows that the connection is still up."""
MOST_VIEWERS = 200
RETRY_MS = 1000
Health = Callable[[], dict[str, Any]]


def make_app(board: ReadModel, operator: Operator, access: Access, health: Health) -> web.Application:
    """Make the web application for a board.

    Args:
        operator: performs the operator's actions.
        access: who may look and who may act. Its hosts are names of the page besides addresses, localhost and this
            machine's name: NAME, or NAME:PORT behind a proxy on an unusual port. Requests under other names are refused
            (DNS rebinding).
        health: the answer to /healthz; if its "ok" is false, the status is 503.
    """
    app = _application(board, health, access, public=False)
    app.add_routes([web.get("/metrics", Metrics(board).answer), web.post("/api/login", access.login)])
    app.add_routes(action_routes(operator, access))
    return app


def make_public_app(board: ReadModel, health: Health, hosts: Collection[str]) -> web.Application:
    """Make the web application that everybody may look at: without actions, and without what is private."""
    return _application(board, health, Access("", hosts), public=True)


def _application(board: ReadModel, health: Health, access: Access, public: bool) -> web.Application:
    """The page and its read API."""
    watch = Watch()
    stream, api = Stream(board, watch, public), Api(board, watch, health, public)
    remedy = "; if it is, start the coordinator with it: pier-coordinator start --host {}"
    guards = [under_known_names(access.hosts, remedy), access.for_viewers]
    app = web.Application(client_max_size=LARGEST_BODY, middlewares=guards)
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(stream.running)
    app.on_shutdown.append(stream.close)
    app.add_routes(
        [
            web.get("/", _index),
            web.static("/static", STATIC),
            web.get("/healthz", api.healthz),
            web.get("/api/board", api.board),
            web.get("/api/nodes", api.nodes),
            web.get("/api/events", api.events),
            web.get("/api/curves", api.curves),
            web.get("/api/rounds", api.rounds),
            web.get("/api/links", api.links),
            web.get("/api/pipeline", api.pipeline),
            web.get("/api/pipeline/chart.svg", api.chart),
            web.get("/api/stream", stream.answer),
        ]
    )
    if not public:  # what a site has logged is private
        app.router.add_get("/api/log", api.log)
    return app


async def _index(_request: web.Request) -> web.StreamResponse:
    """The page."""
    return web.FileResponse(STATIC / "index.html")


class Api:
    """Answers requests from a board. `public`: what is private is left out."""

    def __init__(self, board: ReadModel, watch: Watch, health: Health, public: bool) -> None:
        self._board, self._watch, self._health, self._public = board, watch, health, public

    async def healthz(self, _request: web.Request) -> web.Response:
        """200 if the coordinator works, else 503."""
        health = self._health()
        return web.json_response(health, status=200 if health["ok"] else 503)

    async def board(self, _request: web.Request) -> web.Response:
        """The whole board, with which the page begins."""
        told = {**self._board.snapshot(), "alerts": self._watch.told(self._board)}
        return compressed(public_board(told) if self._public else told)

    async def nodes(self, _request: web.Request) -> web.Response:
        """The table of sites."""
        self._board.refresh()
        rows = self._board.rows()
        return compressed({"sites": [public_site(row) for row in rows] if self._public else rows})

    async def events(self, request: web.Request) -> web.Response:
        """?after=NUMBER&limit=COUNT: the first COUNT events stored after NUMBER; without `after`, the last COUNT."""
        after, limit = _whole(request, "after", 0), _whole(request, "limit", EVENTS)
        events = self._board.events(after=after)
        events = public_events(events) if self._public else events
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

    async def log(self, request: web.Request) -> web.Response:
        """?node=A: the last lines of a site's log, each with its time, its level (Python's logging) and its text."""
        lines = self._board.lines_of(request.query.get("node", ""))
        return compressed({"lines": [dict(zip(("time", "level", "text"), line, strict=True)) for line in lines]})


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


class Stream:
    """All open pages and the tick that they share. `public`: what is private is left out."""

    def __init__(self, board: ReadModel, watch: Watch, public: bool) -> None:
        self._board, self._watch, self._public = board, watch, public
        self._tick: asyncio.Future[None] | None = None
        self._alerts: list[dict[str, Any]] = []
        self._made: tuple[int, int, bytes] = (-2, -2, b"")
        self._viewers = 0
        self._closed = False

    async def running(self, _app: web.Application) -> AsyncIterator[None]:
        """Tick while the application runs."""
        self._tick = asyncio.get_running_loop().create_future()
        pulse = asyncio.create_task(self._beat())
        yield
        await cancel_and_wait(pulse)

    async def close(self, _app: web.Application) -> None:
        """End all streams; browsers reconnect once a coordinator runs again."""
        self._closed = True
        self._turn()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(max(TICK, len(self._board.sites) / SITES_A_SECOND))
            if self._viewers:
                self._look()
                self._turn()

    def _look(self) -> None:
        alerts = self._watch.told(self._board)
        if alerts != self._alerts:
            self._board.stamp += 1
            self._alerts = alerts

    def _turn(self) -> None:
        tick, self._tick = self._tick, asyncio.get_running_loop().create_future()
        if tick and not tick.done():
            tick.set_result(None)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: what changes, at most twice a second."""
        if self._viewers >= MOST_VIEWERS:
            raise web.HTTPServiceUnavailable(text="too many watch this page: close some of them")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await stream.prepare(request)
        self._viewers += 1
        try:
            await self._tell(stream, self._seen(request.headers.get("Last-Event-ID", "")))
        except ConnectionResetError:
            pass  # the browser has gone
        finally:
            self._viewers -= 1
        return stream

    def _seen(self, event_id: str) -> int:
        """The stamp up to which a browser has seen this board; -1: it has not seen it."""
        boot, _, stamp = event_id.partition("-")
        known = boot == self._board.boot and stamp.isascii() and stamp.isdigit() and len(stamp) < 19
        return int(stamp) if known and int(stamp) <= self._board.stamp else -1

    async def _tell(self, stream: web.StreamResponse, seen: int) -> None:
        await stream.write(b"retry: %d\n\n" % RETRY_MS)
        self._look()
        while not self._closed:
            if self._board.stamp > seen:
                seen, event = self._event(seen)
                await stream.write(event)
            await self._next_tick(stream)

    async def _next_tick(self, stream: web.StreamResponse) -> None:
        assert self._tick is not None
        while not self._closed:
            done, _ = await asyncio.wait([self._tick], timeout=HEARTBEAT)
            if done:
                return
            await stream.write(b": still here\n\n")

    def _event(self, seen: int) -> tuple[int, bytes]:
        """The new stamp and an event with what changed since `seen`; pages at the same stamp share one event."""
        if self._made[:2] != (seen, self._board.stamp):
            told = {**self._board.changes(max(0, seen)), "alerts": self._alerts}
            told = public_board(told) if self._public else told
            event = f"id: {told['boot']}-{told['stamp']}\nevent: board\ndata: {dumps(told)}\n\n"
            self._made = (seen, told["stamp"], event.encode())
        return self._made[1], self._made[2]


RUN = {
    "round": "newest committed round of any site",
    "sites": "sites that have registered",
    "alive": "sites that are there now",
    "paused": "of these, sites that the operator has paused",
    "tokens": "tokens trained on by all sites",
    "tokens_per_second": "speed of all sites together",
    "loss": "mean training loss, nats a token",
    "validation_loss": "last validation loss, nats a token",
    "bytes_sent": "payload bytes that sites sent to each other",
    "round_seconds": "mean duration of the last rounds",
}

SITE: dict[str, tuple[str, Callable[[ReadModel, Site], float | None]]] = {
    "up": ("1: the site is there", lambda _, site: float(site.shown not in ("silent", *GONE))),
    "round": ("its last committed round", lambda _, site: site.round),
    "lag": ("rounds behind the newest", lambda board, site: site.lag(board.round)),
    "inner_step": ("inner steps done", lambda _, site: site.inner_step),
    "tokens_per_second": ("speed of its training, 0 while it does not train", lambda _, site: site.speed),
    "loss": ("its last training loss, nats a token", lambda _, site: site.loss),
    "gradient_norm": ("norm of its last gradient, before clipping", lambda _, site: site.gradient_norm),
    "utilisation": ("fraction of the time in inner steps", lambda _, site: site.utilisation),
    "uplink_bytes_per_second": ("measured uplink", lambda board, site: board.links.uplink(site.node)),
    "bytes_sent": ("payload bytes it sent to other sites", lambda _, site: site.bytes_sent),
    "memory_bytes": ("memory of its daemon and workers", lambda _, site: site.memory),
    "device_memory_bytes": ("most memory that training took of one device", lambda _, site: site.device_memory),
    "mfu": ("fraction of the devices' peak FLOPs that the model takes", lambda _, site: site.mfu),
    "cpu": ("fraction of its machine's cores that is busy", lambda _, site: site.cpu),
    "last_heard_timestamp_seconds": ("when something last came from it", lambda _, site: site.heard),
    "reports_dropped": ("reports it lost", lambda _, site: site.dropped),
}


class Metrics:
    """Answers with the metrics of a board, for Prometheus."""

    def __init__(self, board: ReadModel) -> None:
        self._board = board

    async def answer(self, _request: web.Request) -> web.Response:
        """The metrics below. They are written down in a thread: a thousand sites take a tenth of a second."""
        self._board.refresh()
        body = await asyncio.to_thread(generate_latest, _Collected(list(self._families())))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _families(self) -> Iterator[GaugeMetricFamily]:
        board = self._board
        run, totals = str(board.run.get("name", "")), board.totals()
        for name, text in RUN.items():
            family = GaugeMetricFamily(f"pier_run_{name}", text, labels=["run"])
            family.add_metric([run], _value(totals[name]))
            yield family
        for name, (text, value) in SITE.items():
            family = GaugeMetricFamily(f"pier_site_{name}", text, labels=["run", "site", "node"])
            for site in board.sites.values():
                family.add_metric([run, site.name, site.node], _value(value(board, site)))
            yield family


class _Collected(Collector):
    """Metrics with their values."""

    def __init__(self, families: Iterable[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """All of them; called by generate_latest."""
        return self._families


def _value(value: float | None) -> float:
    return math.nan if value is None else float(value)
