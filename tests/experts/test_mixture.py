"""What holds for every mixture, golden values, and every rule against its definition, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pier_node.experts.comparison import even
from pier_node.experts.mixture import Array, Kind, Mixture, decay, fixed_share, follow, geometric, log_sum, rule, score

KINDS: list[Kind] = ["decay", "fixed-share", "bayes", "uniform"]
BAYES = rule("bayes")
SEEDS = st.integers(0, 10_000)
VOCAB = 11


def distributions(seed: int, experts: int, tokens: int) -> Array:
    """Experts that predict something else at every token: log p, [experts, tokens, vocabulary]."""
    return np.log(np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.3), (experts, tokens)) + 1e-9)


def drawn(seed: int, experts: int = 3, tokens: int = 40) -> Array:
    """What experts gave a text, [experts, tokens]."""
    return distributions(seed, experts, tokens)[:, :, 0]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_token_by_token_is_the_same_as_by_rows(kind: Kind, seed: int) -> None:
    rows = np.stack([drawn(seed), drawn(seed + 1)], axis=1)  # [experts, rows, tokens]
    together = score(rule(kind), even(3), rows)
    for row in (0, 1):
        mixture = Mixture(rule(kind), even(3))
        alone = []
        for token in rows[:, row].T:
            alone.append(float(mixture.predict(token[:, None])[0]))
            mixture.observe(token)
        assert alone == pytest.approx(together[row].tolist(), abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, token=st.integers(0, 39))
@settings(max_examples=25, deadline=None)
def test_weights_know_nothing_of_what_comes(kind: Kind, seed: int, token: int) -> None:
    text, other = drawn(seed), drawn(seed)
    other[:, token:] = drawn(seed + 1)[:, token:]
    before, after = (follow(rule(kind), even(3), each)[:, : token + 1] for each in (text, other))
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_experts_have_no_order(kind: Kind, seed: int) -> None:
    text, prior = drawn(seed), np.array([0.2, 0.3, 0.5])
    order = [2, 0, 1]
    expected = follow(rule(kind), prior, text)[order]
    assert follow(rule(kind), prior[order], text[order]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_a_mixture_is_a_distribution_and_scores_are_of_it(kind: Kind, seed: int) -> None:
    predicted, text = distributions(seed, 3, 6), np.random.default_rng(seed).integers(0, VOCAB, 6)
    gold = predicted[:, np.arange(6), text]
    mixture, scores = Mixture(rule(kind), even(3)), score(rule(kind), even(3), gold)
    for token in range(6):
        whole = mixture.predict(predicted[:, token])
        assert np.exp(whole).sum() == pytest.approx(1, abs=1e-5)
        assert whole[text[token]] == pytest.approx(scores[token], abs=1e-12)
        mixture.observe(gold[:, token])


@given(SEEDS, st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_bayes_is_the_mixture_of_whole_texts(seed: int, experts: int) -> None:
    """The chain rule; a sum in bfloat16, or weights that are a token late, would not pass."""
    text, prior = drawn(seed, experts, 200), np.random.default_rng(seed).dirichlet(np.ones(experts))
    whole = text.sum(axis=1) + np.log(prior)
    expected = whole.max() + math.log(np.exp(whole - whole.max()).sum())
    assert score(BAYES, prior, text).sum() == pytest.approx(expected, rel=1e-6)


@given(SEEDS, st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_regret_of_bayes(seed: int, experts: int) -> None:
    text, prior = drawn(seed, experts), np.random.default_rng(seed).dirichlet(np.ones(experts))
    assert -score(BAYES, prior, text).sum() <= np.min(-text.sum(axis=1) - np.log(prior)) + 1e-9


@pytest.mark.parametrize(("experts", "factor"), [(3, 1.00107), (9, 1.00215), (64, 1.00407)])
def test_regret_of_bayes_over_1024_tokens(experts: int, factor: float) -> None:
    text = drawn(experts, experts, 1024)
    perplexity, best = math.exp(-score(BAYES, even(experts), text).mean()), math.exp(-text.mean(axis=1).max())
    assert perplexity <= best * experts ** (1 / 1024) * (1 + 1e-9)
    assert experts ** (1 / 1024) == pytest.approx(factor, abs=1e-5)


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_regret_of_fixed_share_against_experts_in_turn(seed: int, switches: int) -> None:
    """Also against the best sequence in hindsight, which changes its expert so many times."""
    share, tokens, experts = 0.05, 60, 3
    text = drawn(seed, experts, tokens)
    best = np.full((experts, switches + 1), -np.inf)
    best[:, 0] = 0
    for token in text.T:
        others = [np.delete(best[:, :-1], expert, axis=0).max(axis=0) for expert in range(experts)]
        best[:, 1:] = np.maximum(best[:, 1:], others)
        best += token[:, None]
    for count in range(switches + 1):
        penalty = math.log(experts) + count * math.log((experts - 1) / share)
        penalty += (tokens - 1 - count) * math.log(1 / (1 - share))
        loss = -score(fixed_share(share), even(experts), text).sum()
        assert loss <= -best[:, count].max() + penalty + 1e-6


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_orders_that_always_hold(seed: int) -> None:
    text = drawn(seed)
    mixture = -score(rule("uniform"), even(3), text).sum()
    mean = -geometric(text).sum()
    assert mixture <= mean + 1e-9
    assert mean <= np.max(-text.sum(axis=1)) + 1e-9


def test_the_golden_geometric_mean() -> None:
    assert -geometric(np.log([[0.5, 0.2, 0.4], [0.1, 0.6, 0.3]])).sum() == pytest.approx(3.618130, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [1, 4])
def test_one_expert_and_equal_experts_are_the_expert(kind: Kind, experts: int) -> None:
    text = np.repeat(drawn(5, 1), experts, axis=0)
    assert score(rule(kind), even(experts), text) == pytest.approx(text[0], abs=1e-12)


def toy(seed: int, tokens: int = 1024, rows: int = 12) -> tuple[Array, Array]:
    """Three experts (5.4 of the spec) on texts of one domain, and on texts whose domain changes, [3, rows, T]."""
    random = np.random.default_rng(seed)
    domains = random.dirichlet(np.full(200, 0.15), 3)
    experts = np.log(0.85 * domains + 0.10 * domains.mean(axis=0) + 0.05 / 200)
    single = random.choice(200, (rows, tokens), p=domains[0])
    parts = [random.choice(200, (rows, 128), p=domains[part % 3]) for part in range(tokens // 128)]
    return experts[:, single], experts[:, np.concatenate(parts, axis=1)]


def test_the_posterior_finds_the_domain_and_only_some_follow_its_changes() -> None:
    single, changing = toy(1)

    def perplexity(kind: Kind, text: Array, gamma: float = 0.9) -> float:
        return math.exp(-score(rule(kind, gamma, 1 / 128), even(3), text).mean())

    assert perplexity("bayes", single) < 1.01 * math.exp(-single[0].mean())
    assert perplexity("bayes", single) < perplexity("fixed-share", single) < perplexity("uniform", single)
    for kind in ("fixed-share", "decay"):
        assert perplexity(kind, changing) < 0.7 * perplexity("uniform", changing)
    assert perplexity("bayes", changing) > perplexity("uniform", changing)


@pytest.mark.parametrize("prior", [[0.5, 0.6], [1.0, 0.0], [1.5, -0.5]])
def test_what_is_no_prior_is_refused(prior: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and has sum 1"):
        Mixture(BAYES, np.array(prior))


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_expert_the_others_go_on_with_sum_one(kind: Kind) -> None:
    text = drawn(7)
    mixture = Mixture(rule(kind), even(3))
    for token in text.T[:20]:
        mixture.observe(token)
    before = np.exp(mixture.log_weights)
    mixture.drop(1)
    left = before[[0, 2]] / before[[0, 2]].sum()
    assert np.exp(mixture.log_weights).tolist() == pytest.approx(left.tolist())
    for token in text.T[20:]:
        mixture.observe(token[[0, 2]])
    assert np.exp(mixture.log_weights).sum() == pytest.approx(1)


def test_the_only_expert_is_not_dropped() -> None:
    with pytest.raises(ValueError, match="needs an expert"):
        Mixture(BAYES, even(1)).drop(0)


GOLDEN = np.log([[0.5, 0.2, 0.4], [0.1, 0.6, 0.3]])
HALF = np.array([0.5, 0.5])

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
