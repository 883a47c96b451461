"""Traces of what a site does, as spans within spans, for OpenTelemetry.

Code marks a phase with `span`. That does nothing until the process has a tracer: site/traces.py gives it one if the
site's owner wants traces. A span belongs to the one around it, also across tasks and threads that asyncio starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


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
