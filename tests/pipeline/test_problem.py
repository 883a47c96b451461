"""The problem that a run poses for its sites: times measured or taken for others, and when to plan again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.planning.plan import violations
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.problem import UNKNOWN, drawn, drifted, posed, sites_of, with_times
from pier_proto.v1.peer_pb2 import Place

SIX = {node: Place(forward=1.0, backward=2.0, loss=0.5, memory=3, transfer={"a": 0.25}) for node in "abcdef"}


def section(**keys: object) -> PipelineSection:
    return PipelineSection.model_validate({"stages": 4, "microbatches": 6, **keys})


def test_it_is_that_of_the_run_with_what_its_sites_measured() -> None:
    """SkipPipe (arXiv 2502.19913): n_0 : n = 3 : 2 for paths of 3 of 4 stages, as near as six sites come."""
    problem, plan = posed(section(), SIX, {}, seed=1)
    assert (problem.stage_sizes, problem.path_length, problem.microbatches) == ((2, 2, 1, 1), 3, 6)
    assert [site.name for site in problem.sites] == [*"abcdef"]
    assert {(it.forward_s, it.backward_s, it.loss_s, it.memory) for it in problem.sites} == {(1.0, 2.0, 0.5, 3)}
    assert {problem.transfer_s[a][b] for a in range(6) for b in range(6) if a != b} == {0.25}
    assert problem.rules.max_jump == 3
    assert violations(problem, plan) == []


def test_sites_may_keep_their_stages() -> None:
    stages = ((0, 1), (2, 5), (3,), (4,))
    problem, plan = drawn(section(), (2, 2, 1, 1), SIX, {}, stages, seed=1)
    assert plan.stages == stages
    assert violations(problem, plan) == []


def test_too_few_sites_are_refused_and_little_memory_takes_more_waves() -> None:
    with pytest.raises(PierError, match="3 sites cannot hold 4 stages"):
        posed(section(), {node: SIX[node] for node in "abc"}, {}, seed=1)
    assert posed(section(), SIX, {}, seed=1)[0].waves == 2
    lean = {node: Place(memory=1) for node in "abcdef"}
    assert posed(section(), lean, {}, seed=1)[0].waves == 3


@settings(max_examples=25, deadline=None)
@given(
    sites=st.integers(2, 9),
    stages=st.integers(2, 6),
    skip=st.sampled_from([0.0, 0.25, 0.5]),
    microbatches=st.integers(1, 9),
    memory=st.integers(1, 4),
)
def test_whatever_is_posed_has_a_plan_that_is_allowed(
    sites: int, stages: int, skip: float, microbatches: int, memory: int
) -> None:
    asked = section(stages=stages, skip=skip, microbatches=microbatches, memory=memory)
    places = {f"s{at}": Place(forward=1.0 + at, backward=2.0, memory=memory) for at in range(sites)}
    if sites < stages:
        with pytest.raises(PierError):
            posed(asked, places, {}, seed=3)
        return
    assert violations(*posed(asked, places, {}, seed=3)) == []


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
