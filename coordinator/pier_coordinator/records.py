"""The records of a report as facts. What is not known is NaN in a message and None in a fact."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import Message

from pier.v1.coordinator_pb2 import Record, ReportRequest
from pier_coordinator.facts import Fact
from pier_coordinator.store.reports import Report


def report(node: str, request: ReportRequest, now: float) -> Report:
    """A report as it is stored."""
    facts = [fact(node, record, now) for record in request.records]
    return Report(node, request.stream, request.first, facts, request.dropped)


def fact(node: str, record: Record, now: float) -> Fact:
    """A record as a fact. By the site's clock it may have happened later than now: it has not."""
    kind = record.WhichOneof("body")
    assert kind is not None
    return Fact(min(record.time, now), kind, node, _fields(getattr(record, kind)))


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, int | str) else list(value)
