"""When a round counts as a step, and what it says then; golden numbers of versions; which rounds are outer ones."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.cases import config, iteration_plan

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.outer.mean import Update, norm_limit, weighted_mean
from pier_node.outer.schedule import total_rounds
from pier_node.outer.state import OuterState
from pier_node.pipeline import vote_state
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.vote_state import Turn, VoteState, turn_of
from pier_proto.v1.peer_pb2 import Total

PLAN = Plan.read(iteration_plan([0, 1, 3], [[0, 1], [0, 2]]), 4)
TOTAL = Total(square=2.0, loss=3.5)
READY, NOT = vote_state.ready(PLAN, TOTAL, 4), vote_state.not_ready(4)
BEGIN = vote_state.beginning(4, "a")


def decided(state: OuterState, **brought: Update) -> OuterState:
    mean = SharedVector(vote_state.length(4))
    givers = [it for it in brought.values() if it.tokens]
    weighted_mean([it.vector for it in givers], [np.float32(1)] * len(givers), mean.array)
    return vote_state.advance(state, mean, {node: it.tokens for node, it in brought.items()})


def test_a_step_is_taken_when_all_of_the_plan_are_ready() -> None:
    state = decided(BEGIN, a=READY, b=READY, c=READY, d=NOT)
    found = vote_state.vote_state_of(state)
    version = 1 << 24 | vote_state.tag_of(vote_state.name_of(PLAN, TOTAL))
    assert (found.steps, found.loss, found.met, found.counted) == (1, 3.5, 1, version)
    assert found.versions == (version, version, 0, version)
    assert state.members == ("a", "b", "c", "d")
    assert state.ledger == {"a": 1, "b": 1, "c": 1, "d": 0}


def test_replicas_that_step_apart_keep_their_versions_until_they_meet() -> None:
    apart = vote_state.ready(PLAN, TOTAL, 4, apart=True)
    state = decided(decided(BEGIN, a=READY, b=READY, c=READY), a=apart, b=apart, c=apart)
    before, found = (
        vote_state.version(1, vote_state.tag_of(vote_state.name_of(PLAN, TOTAL))),
        vote_state.vote_state_of(state),
    )
    assert (found.steps, found.met, found.versions) == (2, 1, (before, before, 0, before))
    assert vote_state.round_of(found.counted) == 2
    plan = Plan.read(iteration_plan([0, 1, 3], [], meet=True), 4)
    total = Total(moved=[0, 3], digests=[b"0" * 32, b"3" * 32])
    outer = vote_state.ready(plan, total, 4)
    met = vote_state.vote_state_of(decided(state, a=outer, b=outer, c=outer))
    version = 3 << 24 | vote_state.tag_of(vote_state.name_of(plan, total))
    assert (met.steps, met.met, met.loss, met.counted) == (2, 2, 3.5, version)
    assert met.versions == (version, before, 0, version)


OTHER = vote_state.ready(PLAN, Total(square=2.0, loss=3.25), 4)


@pytest.mark.parametrize(
    "brought",
    [
        {"a": READY, "b": READY, "c": NOT},
        {"a": READY, "b": READY},
        {"a": READY, "b": READY, "c": OTHER},
        {"a": READY, "b": READY, "c": READY, "d": OTHER},
        {"a": NOT},
    ],
)
def test_anything_else_is_an_empty_round(brought: dict[str, Update]) -> None:
    state = decided(decided(BEGIN, a=READY, b=READY, c=READY), **brought)
    assert state.round == 2
    assert vote_state.vote_state_of(state).steps == 1
    assert vote_state.vote_state_of(state).versions[0] >> 24 == 1


@given(st.integers(1, 1024), st.binary(min_size=32, max_size=32))
def test_a_mean_of_equal_names_is_exact_for_any_number_of_sites(sites: int, noise: bytes) -> None:
    total = Total(square=float(noise[0]), loss=float(noise[1]))
    vector = vote_state.ready(PLAN, total, 4).vector
    mean = np.zeros_like(vector)
    weighted_mean([vector] * sites, [np.float32(1)] * sites, mean)
    assert np.array_equal(mean[: vote_state.LOSS], vector[: vote_state.LOSS])


def test_no_vector_is_longer_than_a_round_allows() -> None:
    longest = reduce(max, (vote_state.ready(PLAN, Total(loss=20.0, square=it), 4).norm for it in range(50)))
    assert longest < norm_limit(BEGIN.norm) / 3


RUNS = {
    "tttttt": None,
    "aamaamaam": {"algorithm": "pier", "inner_steps": 2, "start": "none"},
    "ttaamaam": {"algorithm": "pier", "inner_steps": 2},
    "aaaamaam": {"algorithm": "diloco", "inner_steps": 4},
    "aaaaaam": {"algorithm": "diloco"},
    "amamamamamam": {"algorithm": "diloco", "inner_steps": 1},
}


@pytest.mark.parametrize("rounds", RUNS)
def test_a_run_is_these_rounds(rounds: str) -> None:
    tables = config().model_dump(mode="json", exclude={"outer"})
    outer = RUNS[rounds]
    run = RunConfig.model_validate(tables | ({"outer": outer} if outer else {}))
    found, voted = "", VoteState(0, 0.0, ())
    while turn := turn_of(run, voted):
        found += turn.value[0]
        steps = voted.steps + (turn is not Turn.MEET)
        voted = replace(voted, steps=steps, met=voted.met if turn is Turn.APART else steps)
    assert found == rounds
    assert total_rounds(run) == len(rounds)
