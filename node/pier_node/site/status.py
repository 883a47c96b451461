"""A node's status over HTTP on this machine, read-only: /healthz, /status (JSON), /metrics (Prometheus)."""

from __future__ import annotations

import math
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from pier_node.base.http import under_known_names
from pier_node.site.report import Status, finite

METRICS = {
    "round": "last committed outer round",
    "inner_step": "inner steps done",
    "tokens": "tokens trained on by this site",
    "tokens_per_second": "speed of the inner training",
    "loss": "last training loss, nats a token",
    "validation_loss": "last validation loss, nats a token",
    "spread": "standard deviation between replicas, as the last pair saw it (noloco)",
    "bytes_sent": "payload bytes sent to other sites",
    "round_seconds": "duration of the last outer round",
    "utilisation": "fraction of the time spent in inner steps",
}


class StatusServer:
    """Serves a status on 127.0.0.1.

    Args:
        status: returns the current status; see report.py.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._runner: web.AppRunner | None = None
        self._registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"pier_{name}", text, ["run", "site"], registry=self._registry)
            for name, text in METRICS.items()
        }

    async def start(self, port: int) -> int:
        """Start listening. Returns the port."""
        app = web.Application(middlewares=[under_known_names()])
        app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/status", self._json), web.get("/metrics", self._metrics)]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"ok": True, "phase": self._status()["phase"]})

    async def _json(self, _request: web.Request) -> web.Response:
        return web.json_response(finite(self._status()))

    async def _metrics(self, _request: web.Request) -> web.Response:
        status = self._status()
        for name, gauge in self._gauges.items():
            value = status.get(name)
            gauge.labels(status["run"], status["name"]).set(math.nan if value is None else value)
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
