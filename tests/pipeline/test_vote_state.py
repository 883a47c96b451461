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
from pier_node.outer.mean import Update, capped, norm_limit, relative_weights, weighted_mean
from pier_node.outer.schedule import total_rounds
from pier_node.outer.state import OuterState
from pier_node.pipeline import vote_state
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.vote_state import Turn, VoteState, turn_of
from pier_proto.v1.peer_pb2 import Total

PLAN = Plan.read(iteration_plan([0, 1, 3], [[0, 1], [0, 2]]), 4)
TOTAL = Total(square=2.0, loss=3.5)
RUN = config()
READY, NOT = vote_state.ready(PLAN, TOTAL, 4), vote_state.not_ready(4)
BEGIN = vote_state.beginning(4, "a")


def exchanged(state: OuterState, brought: dict[str, Update]) -> tuple[SharedVector, dict[str, int]]:
    """The mean and the tokens of a round, as its members see them."""
    mean, bounds = SharedVector(vote_state.length(4)), vote_state.ONE_RESULT
    tokens = bounds.believed({node: it.tokens for node, it in brought.items()}, state.ledger)
    givers = [brought[node].vector for node, count in tokens.items() if count]
    counts = capped([count for count in tokens.values() if count], bounds.whole, bounds.most)
    weighted_mean(givers, relative_weights(counts), mean.array)
    return mean, tokens


def decided(state: OuterState, **brought: Update) -> OuterState:
    return vote_state.advance(RUN, state, *exchanged(state, brought))


def test_a_step_is_taken_when_all_of_the_plan_are_ready() -> None:
    state = decided(BEGIN, a=READY, b=READY, c=READY, d=NOT)
    found = vote_state.vote_state_of(state)
    version = 1 << 24 | vote_state.tag_of(vote_state.name_of(PLAN, TOTAL))
    assert (found.steps, found.loss, found.met, found.counted) == (1, 3.5, 1, version)
    assert found.versions == (version, version, 0, version)
    assert state.members == ("a", "b", "c", "d")
    assert state.ledger == {"a": 1, "b": 1, "c": 1, "d": 0}


ONCE = decided(BEGIN, a=READY, b=READY, c=READY)
"""The state after a step of a, b and c."""
TWICE = RunConfig.model_validate(
    RUN.model_dump(mode="json") | {"outer": {"algorithm": "pier", "start": "sync", "inner_steps": 1}}
)
"""A run that averages at the first step."""


def test_replicas_that_step_apart_keep_their_versions_until_they_meet() -> None:
    apart = vote_state.ready(PLAN, TOTAL, 4, apart=True)
    state = vote_state.advance(TWICE, ONCE, *exchanged(ONCE, dict.fromkeys("abc", apart)))
    before, found = (
        vote_state.version(1, vote_state.tag_of(vote_state.name_of(PLAN, TOTAL))),
        vote_state.vote_state_of(state),
    )
    assert (found.steps, found.met, found.versions) == (2, 1, (before, before, 0, before))
    assert vote_state.round_of(found.counted) == 2
    plan = Plan.read(iteration_plan([0, 1, 3], [], meet=True), 4)
    total = Total(moved=[0, 3], digests=[b"0" * 32, b"3" * 32])
    outer = vote_state.ready(plan, total, 4)
    met = vote_state.vote_state_of(vote_state.advance(TWICE, state, *exchanged(state, dict.fromkeys("abc", outer))))
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
        {"a": NOT},
    ],
)
def test_anything_else_is_an_empty_round(brought: dict[str, Update]) -> None:
    state = decided(ONCE, **brought)
    assert (state.round, state.members) == (2, tuple(sorted(brought)))
    assert (state.anchor == ONCE.anchor).all()
    assert state.ledger == {"a": 1, "b": 1, "c": 1}


ALONE = vote_state.ready(Plan.read(iteration_plan([0], [[0]]), 4), TOTAL, 4)


@pytest.mark.parametrize(
    "brought",
    [
        {"x": ALONE},
        {"a": NOT, "b": NOT, "c": NOT, "x": ALONE},
        {"a": NOT, "b": NOT, "c": NOT, "x": READY, "y": READY, "z": READY},
        {"a": ALONE, "b": NOT, "c": NOT},
        {"a": READY, "b": NOT, "c": NOT, "x": READY, "y": READY},
    ],
    ids=["alone", "among members", "three", "one member", "one member with two"],
)
def test_no_step_counts_without_most_of_those_that_took_the_last(brought: dict[str, Update]) -> None:
    assert (decided(ONCE, **brought).anchor == ONCE.anchor).all()


def test_results_that_others_make_up_do_not_spoil_a_step() -> None:
    liars = dict.fromkeys("vwxyz", OTHER)
    for state in (ONCE, decided(ONCE, a=NOT, b=NOT, c=NOT, **dict.fromkeys("vwxyz", NOT))):
        after = decided(state, a=READY, b=READY, c=READY, **liars)
        assert vote_state.vote_state_of(after).steps == 2
        assert {node for node, round in after.ledger.items() if round == after.round} == {"a", "b", "c"}


def test_only_electors_own_shards_however_many_strangers_there_are() -> None:
    waiting = decided(ONCE, a=READY, b=READY, c=READY, d=NOT, x=OTHER)
    assert {"d", "x"} < {*waiting.members}
    assert vote_state.ONE_RESULT.owners(waiting, "abcdtuvwxyz") == ["a", "b", "c"]
    assert vote_state.ONE_RESULT.owners(BEGIN, "abcd") == ["a"], "the founder"
    assert vote_state.ONE_RESULT.owners(waiting, "dx") == ["d", "x"], "or else nobody could decide a round"


def test_a_newcomer_decides_with_the_others() -> None:
    four = vote_state.ready(Plan.read(iteration_plan([0, 1, 3, 2], [[0, 1, 2, 3]]), 4), TOTAL, 4)
    state = decided(ONCE, a=four, b=four, c=four, x=four)
    assert vote_state.vote_state_of(state).steps == 2
    assert vote_state.vote_state_of(state).electors == {"a", "b", "c", "x"}
    assert vote_state.vote_state_of(decided(state, b=READY, c=READY, x=READY)).steps == 3


def test_sites_that_wait_for_their_stage_do_not_hold_the_others_up() -> None:
    waiting = dict.fromkeys("tuvwxyz", NOT)
    state = decided(decided(ONCE, a=NOT, b=NOT, c=NOT, **waiting), a=READY, b=READY, c=READY, **waiting)
    assert vote_state.vote_state_of(state).steps == 2


def test_who_is_gone_is_not_needed_after_the_next_round() -> None:
    five = dict.fromkeys(
        "abcde", vote_state.ready(Plan.read(iteration_plan([0, 1, 3, 0, 1], [[0, 1, 2]]), 4), TOTAL, 4)
    )
    state = decided(decided(BEGIN, **dict.fromkeys("abcde", NOT)), **five)
    left = {"c": READY, "d": READY, "x": READY}
    once = decided(state, **left)
    assert vote_state.vote_state_of(once).steps == 1, "two of five"
    assert vote_state.vote_state_of(decided(once, **left)).steps == 2, "two of two"


MADE_UP = [float("nan"), float("inf"), 3e38, -1.0, 17 / 16, 0.3, 1e-30]


@pytest.mark.parametrize("value", MADE_UP)
@pytest.mark.parametrize("place", [0, 5, 63, *range(vote_state.SITES, vote_state.MOVED + 8)])
def test_no_mean_that_a_site_makes_up_is_a_step(place: int, value: float) -> None:
    if place == vote_state.LOSS and 0 <= value <= vote_state.MOST_LOSS:
        return
    mean, tokens = exchanged(ONCE, dict.fromkeys("abc", READY))
    mean.array[place] = value
    assert (vote_state.advance(RUN, ONCE, mean, tokens).anchor == ONCE.anchor).all()
    hashed = dict.fromkeys("abc", vote_state._claim(mean.array))  # all of them have made it up
    assert (vote_state.advance(RUN, ONCE, mean, hashed).anchor == ONCE.anchor).all()


def test_a_loss_without_bounds_does_not_make_the_vector_longer_than_a_round_allows() -> None:
    update = vote_state.ready(PLAN, Total(square=2.0, loss=1e300), 4)
    assert update.norm < norm_limit(BEGIN.norm)
    assert vote_state.vote_state_of(decided(BEGIN, a=update, b=update, c=update)).loss == vote_state.MOST_LOSS


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
