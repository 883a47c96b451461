"""Property 7 of spec/hdee.md, and the cost of choosing few."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.experts.comparison import chosen, even, fitted, floored
from pier_node.experts.mixture import Array, Kind, rule, score

PRIORS = st.lists(st.floats(0.001, 1), min_size=1, max_size=9).map(lambda parts: np.array(parts) / sum(parts))


def rows(seed: int, gap: float, experts: int = 2, count: int = 100, tokens: int = 64) -> Array:
    """Rows in which expert 0 is better by `gap` nats a token, [experts, rows, tokens]."""
    drawn = np.random.default_rng(seed).normal(-2.0, 0.5, (experts, count, tokens))
    drawn[0] += gap
    return np.minimum(drawn, -0.01)


KINDS: list[Kind] = ["decay", "bayes", "fixed-share"]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_share_the_prior(kind: Kind) -> None:
    """Where the update of HDEE's code ends at [1, 0] or [0, 1], as luck will have it."""
    priors = np.array([fitted(rule(kind), rows(seed, 0.0))[0] for seed in range(50)])
    assert np.mean((priors >= 0.05) & (priors <= 0.95)) >= 0.98


def test_who_is_better_has_more_and_the_others_a_rest() -> None:
    prior = fitted(rule("bayes"), rows(3, 0.5, experts=3))
    assert prior[0] > 0.9
    assert prior[1:].min() >= 0.01 / 3
    assert prior.sum() == pytest.approx(1)


@given(PRIORS, st.floats(0, 0.5))
@settings(max_examples=25, deadline=None)
def test_a_floor_leaves_something_to_all_and_costs_little(prior: Array, floor: float) -> None:
    lifted = floored(prior, floor)
    assert lifted.sum() == pytest.approx(1)
    assert lifted.min() >= floor / len(prior)
    text = np.random.default_rng(len(prior)).uniform(-9, -0.1, (len(prior), 30))
    before, after = (-score(rule("bayes"), each, text).sum() for each in (prior, lifted))
    assert after - before <= math.log(1 / (1 - floor)) + 1e-9


@given(PRIORS, st.integers(0, 12))
@settings(max_examples=25, deadline=None)
def test_the_chosen_are_the_likeliest(prior: Array, most: int) -> None:
    indices, weights = chosen(prior, most)
    assert len(indices) == (min(most, len(prior)) or len(prior))
    assert weights.sum() == pytest.approx(1)
    assert sorted(indices) == [*indices]
    assert prior[indices].min() >= np.delete(prior, indices).max(initial=0.0)
    assert weights == pytest.approx(prior[indices] / prior[indices].sum())


def test_among_equals_the_first_are_chosen() -> None:
    assert chosen(even(4), 2)[0].tolist() == [0, 1]


@given(st.integers(0, 1000), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_regret_of_few_is_of_the_few_and_of_the_prior(seed: int, most: int) -> None:
    random = np.random.default_rng(seed)
    prior, text = random.dirichlet(np.ones(5)), random.uniform(-9, -0.1, (5, 40))
    indices, weights = chosen(prior, most)
    loss = -score(rule("bayes"), weights, text[indices]).sum()
    assert loss <= np.min(-text[indices].sum(axis=1) - np.log(weights)) + 1e-9
