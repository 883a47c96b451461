"""Server-sent events: open pages are sent what changed, at most twice a second.

An event's id is BOOT-STAMP. A browser that reconnects with an id gets what has changed since, or everything if the
board is a new one (the coordinator was restarted). Slow readers miss ticks but no changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiohttp import web

from pier_coordinator.page.api import dumps
from pier_coordinator.runs.alerts import Watch
from pier_coordinator.runs.read_model import ReadModel

TICK = 0.5
SITES_A_SECOND = 250
"""Minimum seconds between two ticks, and maximum sites sent per second: with 1,000 sites, a tick comes every 4 s."""

HEARTBEAT = 15.0
"""Seconds without an event after which a comment shows that the connection is still up."""

MOST_VIEWERS = 200
RETRY_MS = 1000


class Stream:
    """All open pages and the tick that they share."""

    def __init__(self, board: ReadModel, watch: Watch) -> None:
        self._board, self._watch = board, watch
        self._tick: asyncio.Future[None] | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._alerts: list[dict[str, Any]] = []
        self._made: tuple[int, int, bytes] = (-2, -2, b"")
        self._viewers = 0
        self._closed = False

    def start(self) -> None:
        """Start ticking."""
        self._tick = asyncio.get_running_loop().create_future()
        self._pulse = asyncio.create_task(self._beat())

    async def close(self, _app: web.Application) -> None:
        """End all streams; browsers reconnect once a coordinator runs again."""
        self._closed = True
        self._turn()

    async def stop(self) -> None:
        """Stop ticking."""
        if self._pulse:
            self._pulse.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pulse

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
        """GET /api/stream."""
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
            event = f"id: {told['boot']}-{told['stamp']}\nevent: board\ndata: {dumps(told)}\n\n"
            self._made = (seen, told["stamp"], event.encode())
        return self._made[1], self._made[2]
