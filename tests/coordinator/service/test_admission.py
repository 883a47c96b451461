from __future__ import annotations

from typing import Any

import pytest
from coordinator.cases import ALICE, CONFIG, NOW, Ticket, register_request

from pier_coordinator.service.reception import CLOCK, clock, enrolment, registration
from pier_node.wire.carrier import PROTOCOL

SET_IT = "the coordinator's: set it (timedatectl set-ntp true) and start again"


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (0.0, ""),
        (CLOCK, ""),
        (-CLOCK, ""),
        (
            3660.0,
            "your clock is 61 minutes behind the coordinator's: set it (timedatectl set-ntp true) and start again",
        ),
        (
            -5 * 3600.0,
            "your clock is 5 hours ahead of the coordinator's: set it (timedatectl set-ntp true) and start again",
        ),
        (NOW, "your clock is 20833 days behind the coordinator's: set it (timedatectl set-ntp true) and start again"),
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
        ({"protocol": 0, "run_hash": bytes(32), "time": 0.0}, "your Pier is older"),
    ],
)
def test_the_first_thing_that_is_wrong_is_said(fields: dict[str, Any], text: str) -> None:
    said = registration(register_request(ALICE, **fields), CONFIG.hash(), NOW)
    assert said.startswith(text)
    assert bool(said) == bool(text)


def test_an_enrolment_needs_the_protocol_and_a_clock() -> None:
    ticket = Ticket.make()
    assert enrolment(ticket.request(ALICE), NOW) == ""
    assert "protocol" in enrolment(ticket.request(ALICE, protocol=0), NOW)
    assert "your clock" in enrolment(ticket.request(ALICE, time=0.0), NOW)
