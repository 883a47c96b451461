"""Traces of a site's rounds for OpenTelemetry, sent to the collector that [log] of site.toml names as `otlp`.

A trace is a round: its inner steps, and the boundary after them, with waiting, attempts, the exchange, the outer step
and the vote in it (docs/operations.md). OpenTelemetry's own thread sends them: nothing waits for a collector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pier_node.base.tracing import trace_with
from pier_node.site.trackers import SITE_FILE, Who

CLOSE_SECONDS = 5.0
"""How long the end of a site waits for the last spans to be sent."""

log = logging.getLogger(__name__)


def start_traces(endpoint: str, who: Who) -> Callable[[], None]:
    """Trace what this process does from now on. Returns what ends that, within seconds.

    Args:
        endpoint: URL that takes OTLP over HTTP, such as http://localhost:4318/v1/traces; "": nothing is traced.
    """
    if not endpoint:
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "[log] otlp in %s needs OpenTelemetry, which is not installed; in the clone of Pier: scripts/install otel",
            SITE_FILE,
        )
        return lambda: None
    about = {"service.name": "pier-node", "service.instance.id": who.key, "pier.run": who.run, "pier.site": who.site}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=CLOSE_SECONDS)))
    trace_with(provider.get_tracer("pier"))

    def end() -> None:
        trace_with(None)
        closing = threading.Thread(target=provider.shutdown, name="pier-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    return end
