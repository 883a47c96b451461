"""What is wrong with a call of a site, and what its records become."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from coordinator.cases import ALICE, BOB, CONFIG, NOW, STREAM, Ticket, register_request

from pier_coordinator.service.reception import CLOCK, clock, enrolment, fact, facts_of_report, registration
from pier_coordinator.store.facts import Fact
from pier_node.wire.carrier import PROTOCOL
from pier_proto.v1.coordinator_pb2 import LinkRecord, Note, Record, ReportRequest, RoundRecord, Sample

BEFORE = NOW - 86400.0

SET_IT = "the coordinator's: set it (timedatectl set-ntp true)"


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (0.0, ""),
        (CLOCK, ""),
        (-CLOCK, ""),
        (
            3660.0,
            "your clock is 61 minutes behind the coordinator's: set it (timedatectl set-ntp true)",
        ),
        (
            -5 * 3600.0,
            "your clock is 5 hours ahead of the coordinator's: set it (timedatectl set-ntp true)",
        ),
        (NOW, "your clock is 20833 days behind the coordinator's: set it (timedatectl set-ntp true)"),
    ],
)
def test_a_clock_may_be_wrong_by_an_hour(late: float, text: str) -> None:
    assert clock(NOW - late, NOW) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        (
            {"protocol": PROTOCOL - 1},
            f"your Pier is older: it speaks protocol {PROTOCOL - 1}, the coordinator speaks {PROTOCOL}; "
            "upgrade Pier on your site and start again",
        ),
        (
            {"protocol": PROTOCOL + 1},
            f"your Pier is newer: it speaks protocol {PROTOCOL + 1}, the coordinator speaks {PROTOCOL}; "
            "upgrade Pier on the coordinator's machine and start again",
        ),
        (
            {"run_hash": b"\xab" * 32},
            f"your configuration is of run abababab, this coordinator's run is {CONFIG.hash().hex()[:8]}; "
            "start without --run, and the site takes the coordinator's",
        ),
        ({"protocol": 0, "run_hash": bytes(32)}, "your Pier is older"),
    ],
)
def test_the_first_thing_that_is_wrong_is_said(fields: dict[str, Any], text: str) -> None:
    said = registration(register_request(ALICE, **fields), CONFIG.hash())
    assert said.startswith(text)
    assert bool(said) == bool(text)


def test_an_enrolment_needs_the_protocol_and_a_clock() -> None:
    ticket = Ticket.make()
    assert enrolment(ticket.request(ALICE), NOW) == ""
    assert "protocol" in enrolment(ticket.request(ALICE, protocol=0), NOW)
    assert "your clock" in enrolment(ticket.request(ALICE, time=0.0), NOW)


def test_a_record_becomes_a_fact_of_its_kind() -> None:
    sample = Sample(inner_step=1, tokens=2, tokens_per_second=3.5, loss=math.nan, utilisation=0.5, memory=5)
    sample.MergeFrom(Sample(device="8 x H100", device_memory=6, mfu=0.4))
    assert fact(ALICE.node, Record(time=NOW, sample=sample), BEFORE, NOW) == Fact(
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
            "device": "8 x H100",
            "device_memory": 6,
            "mfu": 0.4,
            "cpu": 0.0,
            "gradient_norm": 0.0,
        },
    )
    link = fact(ALICE.node, Record(time=NOW, link=LinkRecord(peer=BOB.node, round_trip=0.5)), BEFORE, NOW)
    assert (link.kind, link.body["peer"], link.body["round_trip"]) == ("link", BOB.node, 0.5)
    assert fact(ALICE.node, Record(time=NOW, note=Note(level=30, text="slow")), BEFORE, NOW).body == {
        "level": 30,
        "text": "slow",
    }


def test_a_round_can_be_written_as_json() -> None:
    body = RoundRecord(round=3, digest=b"\xab" * 32, members=[ALICE.node, BOB.node], validation_loss=math.nan)
    made = fact(ALICE.node, Record(time=NOW, round=body), BEFORE, NOW)
    assert (made.body["digest"], made.body["members"]) == ("ab" * 32, [ALICE.node, BOB.node])
    assert made.body["validation_loss"] is None
    assert json.loads(made.line())["body"] == made.body


def test_nothing_has_happened_later_than_now_or_before_the_site_came() -> None:
    assert fact(ALICE.node, Record(time=NOW + 1800, note=Note()), BEFORE, NOW).time == NOW
    assert fact(ALICE.node, Record(time=NOW - 1800, note=Note()), BEFORE, NOW).time == NOW - 1800
    assert fact(ALICE.node, Record(time=1.0, note=Note()), BEFORE, NOW).time == BEFORE


def test_a_report_keeps_its_numbers() -> None:
    request = ReportRequest(lease=b"l", stream=STREAM, first=7, records=[Record(note=Note(text="a"))], dropped=2)
    made = facts_of_report(ALICE.node, request, BEFORE, NOW)
    assert (made.node, made.stream, made.first, made.dropped, len(made.facts)) == (ALICE.node, STREAM, 7, 2, 1)
