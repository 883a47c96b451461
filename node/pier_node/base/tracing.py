"""Traces of what a site does, as spans within spans, for OpenTelemetry.

Code marks a phase with `span`. That does nothing until `start_traces` names a collector, if the site's owner wants
traces: `otlp` under [log] of site.toml. A span belongs to the one around it, also across tasks and threads that asyncio
starts.

A trace is a round: its inner steps, and the boundary after them, with waiting, attempts, the exchange, the outer step
and the vote in it (docs/operations.md). OpenTelemetry's own thread sends them: nothing waits for a collector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

CLOSE_SECONDS = 5.0
"""How long the end of a site waits for the last spans to be sent."""

log = logging.getLogger(__name__)


class Tracer(Protocol):
    """What is needed of an OpenTelemetry tracer."""

    def start_as_current_span(self, name: str, *, attributes: Any) -> AbstractContextManager[Any]:
        """A span that begins and ends with the block; an exception that leaves the block is recorded."""


_tracer: Tracer | None = None


def trace_with(tracer: Tracer | None) -> None:
    """Give all spans of this process to a tracer from now on; None stops tracing."""
    global _tracer
    _tracer = tracer


@contextmanager
def span(name: str, **attributes: str | int | float) -> Iterator[None]:
    """Mark the block as a phase of what a site does."""
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, attributes={f"pier.{key}": it for key, it in attributes.items()}):
        yield


def start_traces(endpoint: str, about: Mapping[str, str]) -> Callable[[], None]:
    """Trace what this process does from now on. Returns what ends that, within seconds.

    Args:
        endpoint: URL that takes OTLP over HTTP, such as http://localhost:4318/v1/traces; "": nothing is traced.
        about: attributes of the resource, as OpenTelemetry calls what is traced: `service.name` and others.
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
            "traces for %s need OpenTelemetry, which is not installed; in the clone of Pier: scripts/install otel",
            endpoint,
        )
        return lambda: None
    provider = TracerProvider(resource=Resource.create(dict(about)), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=CLOSE_SECONDS)))
    trace_with(provider.get_tracer("pier"))

    def end() -> None:
        trace_with(None)
        closing = threading.Thread(target=provider.shutdown, name="pier-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    return end
