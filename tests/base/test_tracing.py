"""Traces of rounds: what is in them, by OpenTelemetry's own memory, and that they reach a collector."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rounds.cases import Member, scene
from simulation.network import Network
from simulation.training_cases import Rounds, Site, begin, local

from pier_node.base.tracing import span, start_traces, trace_with
from pier_node.site.trackers import Who

pytest.importorskip("opentelemetry.sdk", reason="scripts/install otel: traces are NOT tested")

ABOUT = Who("tiny", "site-a", "0123-node-a").attributes


@pytest.fixture
def traced() -> Iterator[Any]:
    """The memory that all spans of this process go to."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace_with(provider.get_tracer("test"))
    yield memory
    trace_with(None)


def inside(memory: Any) -> set[tuple[str, str]]:
    """(the span around it, or "", and its name) for each kind of span."""
    spans = memory.get_finished_spans()
    names = {it.context.span_id: it.name for it in spans}
    return {(names[it.parent.span_id] if it.parent else "", it.name) for it in spans}


def test_a_round_has_its_inner_steps_and_its_boundary_in_it(traced: Any) -> None:
    Site(local(2), Rounds(begin())).run()
    assert inside(traced) >= {("", "round"), ("round", "inner steps"), ("round", "boundary")}
    rounds = [it.attributes["pier.round"] for it in traced.get_finished_spans() if it.name == "round"]
    assert rounds == [1, 2]


def test_an_attempt_has_the_exchange_the_outer_step_and_the_vote_in_it(traced: Any) -> None:
    async def play(network: Network, members: dict[str, Member]) -> None:
        await asyncio.gather(*(member.contribute(1.0, tokens=10) for member in members.values()))

    scene(play, "ab")
    assert inside(traced) >= {("", "waiting"), *(("attempt", it) for it in ("exchange", "outer step", "vote"))}


def test_without_a_collector_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    start_traces("", ABOUT)()
    with span("round", round=1):
        pass


def test_if_opentelemetry_is_missing_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        start_traces("http://127.0.0.1:1/v1/traces", ABOUT)()
    assert "scripts/install otel" in caplog.text


@contextmanager
def collector(bodies: list[bytes]) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


def test_what_is_left_reaches_the_collector_at_the_end() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []
    with collector(bodies) as address:
        end = start_traces(address, ABOUT)
        with span("round", round=7):
            pass
        end()
        with span("round", round=8):
            pass
    (body,) = bodies
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {it.key: it.value.string_value for it in sent.resource.attributes}
    assert (about["service.name"], about["pier.run"], about["pier.site"]) == ("pier-node", "tiny", "site-a")
    assert [it.name for it in sent.scope_spans[0].spans] == ["round"]
