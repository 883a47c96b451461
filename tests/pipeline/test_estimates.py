"""Times that were measured, those that are taken for others, and what is too little to plan anew for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.problem import UNKNOWN, drifted, sites_of, with_times
from pier_proto.v1.peer_pb2 import Place


def place(transfer: dict[str, float], forward: float = 1.0) -> Place:
    return Place(forward=forward, backward=2.0, loss=0.5, memory=3, transfer=transfer)


A, B, C = place({"b": 0.4, "c": 0.6}), place({"a": 0.2}), Place(memory=2)
APART = ((0.0,) * 3,) * 3


def problem(a: Place = A, b: Place = B, c: Place = C) -> Problem:
    places = {"a": a, "b": b, "c": c}
    return with_times(Problem(sites_of(places), APART, (1, 2), 2, 2), places, {"b": 0.1})


def test_what_was_measured_counts_and_the_rest_is_as_at_its_like() -> None:
    found = problem()
    assert found.transfer_s[:2] == ((0.0, 0.4, 0.6), (0.2, 0.0, 0.2))
    assert found.transfer_s[2] == pytest.approx((0.35, 0.35, 0.0))
    assert found.uplink_s == pytest.approx((0.5, 0.2, 0.35))
    assert [(it.forward_s, it.backward_s, it.loss_s, it.memory) for it in found.sites[1:]] == [
        (1.0, 2.0, 0.5, 3),
        (1.0, 2.0, 0.5, 2),
    ]


def test_before_anything_was_sent_half_of_the_round_trips_must_do() -> None:
    places = dict.fromkeys("abc", Place(memory=1))
    found = with_times(Problem(sites_of(places), APART, (1, 2), 2, 2), places, {"b": 0.1, "c": 0.3})
    assert found.transfer_s[1][2] == pytest.approx(0.1)
    assert found.transfer_s[0][1] == pytest.approx(0.05)
    assert found.uplink_s == ()
    assert {it.forward_s for it in found.sites} == {UNKNOWN.forward}


def test_a_slower_site_or_line_is_a_reason_to_plan_anew() -> None:
    slow = place({"a": 0.2}, forward=5.0)
    assert drifted(problem(), problem(b=slow))
    assert drifted(problem(b=slow), problem())
    assert drifted(problem(), problem(b=place({"a": 1.0})))
    assert not drifted(problem(), problem(b=place({"a": 0.25})))


def test_what_is_small_beside_a_visit_is_none() -> None:
    assert not drifted(problem(), problem(b=place({"a": 0.4}))), "0.2 s of some 4 s"
    quick = replace(problem(), uplink_s=())
    assert not drifted(quick, quick)
