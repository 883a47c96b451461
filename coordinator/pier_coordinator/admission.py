"""What is wrong with a site that wants to come in: pure, and in words that say what to do next; "" if nothing is."""

from __future__ import annotations

from collections.abc import Iterable

from pier.v1.coordinator_pb2 import EnrolRequest, RegisterRequest
from pier_node.wire.carrier import PROTOCOL

CLOCK = 3600.0
"""Seconds by which a site's clock may differ: what it reports would stand in the wrong place of every chart."""


def registration(request: RegisterRequest, run_hash: bytes, now: float) -> str:
    """What is wrong with a registration; names are looked at where they are given out (store/sites.py)."""
    return _first((protocol(request.protocol), configuration(request.run_hash, run_hash), clock(request.time, now)))


def enrolment(request: EnrolRequest, now: float) -> str:
    """What is wrong with an enrolment, besides its invite."""
    return _first((protocol(request.protocol), clock(request.time, now)))


def protocol(theirs: int) -> str:
    """Whether two versions of Pier understand each other."""
    if theirs == PROTOCOL:
        return ""
    older, where = ("older", "your site") if theirs < PROTOCOL else ("newer", "the coordinator's machine")
    return (
        f"your Pier is {older}: it speaks protocol {theirs}, the coordinator speaks {PROTOCOL}; "
        f"upgrade Pier on {where} and start again"
    )


def configuration(theirs: bytes, ours: bytes) -> str:
    """Whether a site has the configuration of this run."""
    if theirs == ours:
        return ""
    return (
        f"your configuration is of run {theirs.hex()[:8]}, this coordinator's run is {ours.hex()[:8]}; "
        "start without --run, and the site takes the coordinator's"
    )


def clock(theirs: float, ours: float) -> str:
    """Whether a site's clock is about right."""
    late = ours - theirs
    if abs(late) <= CLOCK:
        return ""
    side = "behind" if late > 0 else "ahead of"
    wrong = f"your clock is {_amount(abs(late))} {side} the coordinator's"
    return f"{wrong}: set it (timedatectl set-ntp true) and start again"


def _amount(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} minutes"
    return f"{round(minutes / 60)} hours" if minutes < 2880 else f"{round(minutes / 1440)} days"


def _first(problems: Iterable[str]) -> str:
    return next((problem for problem in problems if problem), "")
