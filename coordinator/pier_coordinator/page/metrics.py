"""The coordinator's /metrics for Prometheus: totals of the run, and each site by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.runs.sites import GONE, Site

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
    "lag": ("rounds behind the newest", lambda board, site: board.round - site.round),
    "inner_step": ("inner steps done", lambda _, site: site.inner_step),
    "tokens_per_second": ("speed of its training, 0 while it does not train", lambda _, site: site.speed),
    "loss": ("its last training loss, nats a token", lambda _, site: site.loss),
    "utilisation": ("fraction of the time in inner steps", lambda _, site: site.utilisation),
    "uplink_bytes_per_second": ("measured uplink", lambda board, site: board.links.uplink(site.node)),
    "bytes_sent": ("payload bytes it sent to other sites", lambda _, site: site.bytes_sent),
    "memory_bytes": ("memory of its daemon and workers", lambda _, site: site.memory),
    "last_heard_timestamp_seconds": ("when something last came from it", lambda _, site: site.heard),
    "reports_dropped": ("reports it lost", lambda _, site: site.dropped),
}


class Metrics(Collector):
    """Collects the metrics from the board at each request."""

    def __init__(self, board: ReadModel) -> None:
        self._board = board
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def describe(self) -> list[GaugeMetricFamily]:
        """Describe nothing in advance, since names cannot clash."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics with their current values."""
        board = self._board
        board.refresh()
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

    async def answer(self, _request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _value(value: float | None) -> float:
    return math.nan if value is None else float(value)
