"""The problem that a run poses for its sites."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.planning.check import violations
from pier_node.pipeline.problem import drawn, posed
from pier_proto.v1.peer_pb2 import Place

SIX = {node: Place(forward=1.0, backward=2.0, loss=0.5, memory=3, transfer={"a": 0.25}) for node in "abcdef"}


def section(**keys: object) -> PipelineSection:
    return PipelineSection.model_validate({"stages": 4, "microbatches": 6, **keys})


def test_it_is_that_of_the_run_with_what_its_sites_measured() -> None:
    """spec/skippipe.md section 2.1: n_0 : n = 3 : 2 for paths of 3 of 4 stages, as near as six sites come."""
    problem, plan = posed(section(), SIX, {}, seed=1)
    assert (problem.stage_sizes, problem.path_length, problem.microbatches) == ((2, 2, 1, 1), 3, 6)
    assert [site.name for site in problem.sites] == [*"abcdef"]
    assert {(it.forward_s, it.backward_s, it.loss_s, it.memory) for it in problem.sites} == {(1.0, 2.0, 0.5, 3)}
    assert {problem.transfer_s[a][b] for a in range(6) for b in range(6) if a != b} == {0.25}
    assert problem.rules.max_jump == 3
    assert violations(problem, plan) == []


def test_sites_may_keep_their_stages() -> None:
    stages = ((0, 1), (2, 5), (3,), (4,))
    problem, plan = drawn(section(), (2, 2, 1, 1), 3, SIX, {}, stages, seed=1)
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
