from __future__ import annotations

import json
import math

from coordinator.cases import ALICE, BOB, NOW, STREAM

from pier_coordinator.service.reception import fact, facts_of_report
from pier_coordinator.store.facts import Fact
from pier_proto.v1.coordinator_pb2 import LinkRecord, Note, Record, ReportRequest, RoundRecord, Sample


def test_a_record_becomes_a_fact_of_its_kind() -> None:
    sample = Sample(inner_step=1, tokens=2, tokens_per_second=3.5, loss=math.nan, utilisation=0.5, memory=5)
    assert fact(ALICE.node, Record(time=NOW, sample=sample), NOW) == Fact(
        NOW,
        "sample",
        ALICE.node,
        {
            "inner_step": 1,
            "tokens": 2,
            "tokens_per_second": 3.5,
            "loss": None,
            "utilisation": 0.5,
            "bytes_sent": 0,
            "memory": 5,
        },
    )
    link = fact(ALICE.node, Record(time=NOW, link=LinkRecord(peer=BOB.node, round_trip=0.5)), NOW)
    assert (link.kind, link.body["peer"], link.body["round_trip"]) == ("link", BOB.node, 0.5)
    assert fact(ALICE.node, Record(time=NOW, note=Note(level=30, text="slow")), NOW).body == {
        "level": 30,
        "text": "slow",
    }


def test_a_round_can_be_written_as_json() -> None:
    body = RoundRecord(round=3, digest=b"\xab" * 32, members=[ALICE.node, BOB.node], validation_loss=math.nan)
    made = fact(ALICE.node, Record(time=NOW, round=body), NOW)
    assert (made.body["digest"], made.body["members"]) == ("ab" * 32, [ALICE.node, BOB.node])
    assert made.body["validation_loss"] is None
    assert json.loads(made.line())["body"] == made.body


def test_nothing_has_happened_later_than_now() -> None:
    assert fact(ALICE.node, Record(time=NOW + 1800, note=Note()), NOW).time == NOW
    assert fact(ALICE.node, Record(time=NOW - 1800, note=Note()), NOW).time == NOW - 1800


def test_a_report_keeps_its_numbers() -> None:
    request = ReportRequest(lease=b"l", stream=STREAM, first=7, records=[Record(note=Note(text="a"))], dropped=2)
    made = facts_of_report(ALICE.node, request, NOW)
    assert (made.node, made.stream, made.first, made.dropped, len(made.facts)) == (ALICE.node, STREAM, 7, 2, 1)
