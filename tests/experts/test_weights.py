"""Golden values of spec/hdee.md, property 2; every rule against its definition, written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pier_node.experts.mixture import Array, Kind, decay, fixed_share, follow, log_sum, rule, score

GOLDEN = np.log([[0.5, 0.2, 0.4], [0.1, 0.6, 0.3]])
HALF = np.array([0.5, 0.5])
KINDS: list[Kind] = ["decay", "fixed-share", "bayes", "uniform"]

LOG_PROBS = st.tuples(st.integers(1, 4), st.integers(1, 12)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.floats(-30.0, -0.01))
)


@pytest.mark.parametrize(
    ("kind", "gamma", "weights", "nats"),
    [
        ("bayes", 0.0, [0.5, 0.833333, 0.625], 3.540459),
        ("decay", 0.5, [0.5, 0.833333, 0.427051], 3.596614),
        ("decay", 0.0, [0.5, 0.833333, 0.25], 3.649659),
        ("fixed-share", 0.0, [0.5, 0.766667, 0.518182], 3.475059),
        ("uniform", 0.0, [0.5, 0.5, 0.5], 3.170086),
    ],
)
def test_golden(kind: Kind, gamma: float, weights: list[float], nats: float) -> None:
    chosen = rule(kind, gamma, share=0.1)
    assert np.exp(follow(chosen, HALF, GOLDEN)[0]) == pytest.approx(weights, abs=1e-6)
    assert -score(chosen, HALF, GOLDEN).sum() == pytest.approx(nats, abs=1e-6)


@given(LOG_PROBS, st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_decay_is_a_sum_over_the_past(log_probs: Array, gamma: float) -> None:
    experts = len(log_probs)
    prior = np.arange(1, experts + 1) / np.arange(1, experts + 1).sum()
    for token, found in enumerate(follow(decay(gamma), prior, log_probs).T):
        past = [gamma ** (token - 1 - seen) * log_probs[:, seen] for seen in range(token)]
        expected = np.log(prior) + np.sum(past, axis=0) if past else np.log(prior)
        assert found == pytest.approx(expected - log_sum(expected), abs=1e-9)


@given(LOG_PROBS, st.floats(0.001, 0.9))
@settings(max_examples=25, deadline=None)
def test_fixed_share_is_a_hidden_markov_chain(log_probs: Array, share: float) -> None:
    """Of K domains, that are left for one of the others with probability a."""
    experts = len(log_probs)
    stay = np.eye(experts) if experts == 1 else np.full((experts, experts), share / (experts - 1))
    if experts > 1:
        np.fill_diagonal(stay, 1 - share)
    forward = np.full(experts, 1 / experts)
    for token, found in zip(log_probs.T, follow(fixed_share(share), np.full(experts, 1 / experts), log_probs).T):
        assert np.exp(found) == pytest.approx(forward, rel=1e-6, abs=1e-12)
        forward = (forward * np.exp(token)) @ stay
        forward /= forward.sum()


@pytest.mark.parametrize("kind", KINDS)
@given(log_probs=LOG_PROBS)
@settings(max_examples=25, deadline=None)
def test_weights_are_a_distribution_that_begins_with_the_prior(kind: Kind, log_probs: Array) -> None:
    prior = np.random.default_rng(1).dirichlet(np.ones(len(log_probs)))
    weights = np.exp(follow(rule(kind), prior, log_probs))
    assert np.all(weights >= 0)
    assert weights.sum(axis=0) == pytest.approx(1, abs=1e-6)
    assert weights[:, 0] == pytest.approx(prior)


@pytest.mark.parametrize("kind", KINDS)
@given(log_probs=LOG_PROBS)
@settings(max_examples=25, deadline=None)
def test_an_expert_that_gives_nothing_is_not_out_for_good(kind: Kind, log_probs: Array) -> None:
    silent = np.concatenate([log_probs, np.full((1, log_probs.shape[1]), -np.inf)])
    prior = np.full(len(silent), 1 / len(silent))
    weights = follow(rule(kind), prior, silent)
    assert np.isfinite(weights).all()


def test_weights_that_float32_cannot_hold_come_back() -> None:
    """A thousand tokens for one expert, then a thousand and one for the other."""
    text = np.concatenate([np.tile([[-1.0], [-4.0]], 1000), np.tile([[-4.0], [-1.0]], 1001)], axis=1)
    last = follow(rule("bayes"), HALF, np.concatenate([text, text[:, -1:]], axis=1))[:, -1]
    assert last[1] - last[0] == pytest.approx(3.0, abs=1e-6)


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma = 1.1 must be from 0 to 1"):
        decay(1.1)
    with pytest.raises(ValueError, match="share = 0 must be above 0 and below 1"):
        fixed_share(0)


def test_the_sum_of_nothing_is_nothing() -> None:
    assert log_sum(np.full((3, 2), -np.inf)).tolist() == [-np.inf, -np.inf]
