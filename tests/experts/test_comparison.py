"""Properties 2, 5, 6 and 7 of spec/hdee.md on what is reported, and the order of its table 5.4."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.experts.comparison import GEOMETRIC, ROWS_OF_PRIOR, SINGLE, Scored, compare, disjoint, losses, standings
from pier_node.experts.mixture import Array
from pier_node.experts.sheet import HASH, Hashes

GOLDEN = np.log([[0.5, 0.2, 0.4], [0.1, 0.6, 0.3]])[:, None]  # [experts, 1 row, 3 tokens]
BITS = 3 * math.log(2)
VOCAB, TOKENS = 200, 256


def hashes(count: int, first: int = 0) -> Hashes:
    made = np.zeros((count, HASH), dtype=np.uint8)
    made[:, :4] = np.arange(first, first + count, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    return made


def scored(test: Array, prior: Array) -> Scored:
    return Scored(test, prior, hashes(test.shape[1]), hashes(prior.shape[1], 10_000))


def no_prior() -> Array:
    return np.zeros((2, 0, 3))


def drawn(seed: int, experts: int = 3, rows: int = 5) -> Scored:
    random = np.random.default_rng(seed)
    test, prior = (np.log(random.beta(0.5, 2, (experts, rows, 30)) + 1e-9).clip(max=0) for _ in range(2))
    return scored(test, prior)


def test_golden_values_of_the_specification_are_reported() -> None:
    result, _ = compare(scored(GOLDEN, no_prior()))
    want = {"bayes": 3.540459, "uniform": 3.170086, GEOMETRIC: 3.618130}
    assert {name: result.standings[name].bits_per_byte * BITS for name in want} == pytest.approx(want, abs=1e-6)
    single = -float(GOLDEN[0].sum())
    assert result.standings[SINGLE].perplexity == pytest.approx(math.exp(single / 3))
    assert result.standings["uniform"].is_best
    assert (result.rows, result.tokens) == (1, 3)


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_orders_that_always_hold(seed: int) -> None:
    result, made = compare(drawn(seed), [1, 2, 3])
    bits = {name: standing.bits_per_byte for name, standing in result.standings.items()}
    assert bits["uniform"] <= bits[GEOMETRIC] + 1e-9 <= max(result.experts) + 2e-9
    assert bits["top-3"] == pytest.approx(bits["decay"], abs=1e-9)  # k = K
    assert bits["top-1"] == pytest.approx(result.experts[int(np.argmax(result.prior))], abs=1e-9)
    assert min(result.prior) >= 0.01 / 3 - 1e-12
    single = min(float(rows.sum()) for rows in (-drawn(seed).test).sum(axis=2))
    assert made["bayes"].sum() <= single + 5 * math.log(3 / 0.01)  # regret, and the floor


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_one_expert_is_reproduced_by_every_mixture(seed: int) -> None:
    result, _ = compare(drawn(seed, experts=1), [1])
    assert {round(standing.bits_per_byte, 9) for standing in result.standings.values()} == {round(result.experts[0], 9)}


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_identical_experts_are_as_good_as_one_and_all_tie(seed: int) -> None:
    one = drawn(seed, experts=1)
    result, _ = compare(scored(np.repeat(one.test, 3, axis=0), np.repeat(one.prior, 3, axis=0)))
    ranked = {name: standing for name, standing in result.standings.items() if name != GEOMETRIC}
    assert all(standing.behind == pytest.approx(0, abs=1e-9) for standing in ranked.values())
    assert sum(standing.is_best for standing in ranked.values()) == 1
    assert all(standing.is_best or standing.low <= 1e-12 for standing in ranked.values())


def test_rows_that_are_scored_fit_no_prior() -> None:
    rows = np.concatenate([hashes(3, 2), hashes(2, 50)])
    assert disjoint(rows, hashes(5)).tolist() == [3, 4]
    poisoned = np.full((2, 5, 4), -9.0)
    poisoned[1, :3] = -0.1  # were they used, the second expert would be the single one
    poisoned[0, 3:] = -5.0
    result, _ = compare(Scored(np.full((2, 5, 4), -1.0), poisoned, hashes(5), rows))
    assert (result.left_out, result.single) == (3, 0)
    assert result.prior[0] > 0.5


def test_a_prior_split_that_is_scored_as_a_whole_leaves_an_even_prior() -> None:
    result, _ = compare(Scored(np.full((2, 5, 4), -1.0), np.full((2, 5, 4), -1.0), hashes(5), hashes(5)))
    assert (result.left_out, result.prior) == (5, [0.5, 0.5])


def test_what_is_worse_than_by_the_parent_is_forgotten() -> None:
    test = np.stack([np.full((5, 4), -2.0), np.full((5, 4), -1.0)]) * np.log(2)
    parent = np.full(5, -1.5 * 4 * np.log(2), dtype=np.float32)
    known = Scored(test, test, hashes(5), hashes(5, 10_000), [parent, None])
    assert compare(known)[0].forgotten == [pytest.approx(0.5, abs=1e-6), None]
    assert compare(replace(known, parents=()))[0].forgotten == [None, None]


def test_no_more_rows_fit_the_prior_than_the_specification_says() -> None:
    prior = np.full((2, 3 * ROWS_OF_PRIOR + 7, 4), -1.0)
    prior[0, -7:] = -50.0  # the rest of a division, which is not looked at
    _, found, _ = losses(scored(np.full((2, 4, 4), -1.0), prior))
    assert found.tolist() == pytest.approx([0.5, 0.5])


def test_a_small_steady_difference_is_no_tie_and_noise_is_one() -> None:
    random = np.random.default_rng(5)
    base = random.normal(100, 20, 400)
    made = {"a": base, "b": base + 0.5 + random.normal(0, 0.5, 400), "c": base + 0.02 + np.tile([3.0, -3.0], 200)}
    found = standings([made], [10])
    assert found["a"].is_best
    assert not found["b"].is_tied
    assert found["b"].low > 0
    assert found["c"].is_tied
    bits = 10 * math.log(2)
    assert found["b"].behind == pytest.approx(0.5 / bits, abs=0.01)
    assert found["b"].behind - found["b"].low == pytest.approx(1.96 * 0.5 / 20 / bits, rel=0.15)


def test_the_mean_of_domains_counts_them_alike() -> None:
    found = standings(
        [{"a": np.full(10, 2.0), "b": np.full(10, 1.0)}, {"a": np.full(90, 1.0), "b": np.full(90, 4.0)}], [2, 1]
    )
    assert found["a"].bits_per_byte == pytest.approx((1.0 + 1.0) / 2 / math.log(2))
    assert found["b"].bits_per_byte == pytest.approx((0.5 + 4.0) / 2 / math.log(2))
    assert found["a"].is_best


def toy(stream: str, seed: int = 0) -> dict[str, float]:
    """Table 5.4: perplexity of each method on a stream of three Dirichlet domains."""
    random = np.random.default_rng(seed)
    domains = random.dirichlet(np.full(VOCAB, 0.15), 3)
    experts = 0.85 * domains + 0.10 * domains.mean(axis=0) + 0.05 / VOCAB

    def text(rows: int) -> Array:
        which = {
            "one": np.zeros((rows, TOKENS), dtype=int),
            "documents": np.repeat(random.integers(0, 3, (rows, 1)), TOKENS, axis=1),
            "switch": np.repeat(random.integers(0, 3, (rows, TOKENS // 32)), 32, axis=1),
        }[stream]
        tokens = np.empty_like(which)
        for domain in range(3):
            drawn = random.choice(VOCAB, size=which.shape, p=domains[domain])
            tokens[which == domain] = drawn[which == domain]
        return np.asarray(np.log(experts[:, tokens]))

    result, _ = compare(scored(text(40), text(40)))
    return {name: standing.perplexity for name, standing in result.standings.items()}


def test_on_one_domain_bayes_is_as_good_as_the_best_and_the_plain_mean_is_not() -> None:
    found = toy("one")
    assert found["bayes"] <= found[SINGLE] * 1.02
    assert found["decay"] <= found[SINGLE] * 1.02
    assert found[SINGLE] < found["uniform"] < found[GEOMETRIC]


def test_on_documents_bayes_beats_any_single_expert() -> None:
    found = toy("documents")
    assert found["bayes"] < found["uniform"] < found[SINGLE]


def test_on_text_that_switches_bayes_is_locked_and_fixed_share_is_not() -> None:
    found = toy("switch")
    assert found["fixed-share"] < found["decay"] < found["bayes"]
    assert found["fixed-share"] < found["uniform"] < found[SINGLE]
