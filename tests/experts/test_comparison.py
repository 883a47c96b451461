"""What holds for all that is reported of an ensemble, and its order; sheets put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.experts.comparison import (
    GEOMETRIC,
    ROWS_OF_PRIOR,
    SINGLE,
    Scored,
    chosen,
    compare,
    disjoint,
    evaluated,
    even,
    experts_of,
    fitted,
    floored,
    gather,
    losses,
    standings,
)
from pier_node.experts.mixture import Array, Kind, rule, score
from pier_node.experts.sheet import HASH, Hashes, Sheet, Subject, row_hashes
from pier_node.trainer.data.sources import Split

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


def test_experts_that_have_diverged_are_compared() -> None:
    result, _ = compare(scored(1000 * GOLDEN, no_prior()))
    assert result.standings[GEOMETRIC].perplexity == math.inf


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


def sheet(expert: str, domain: str, split: Split, value: float, rows: int = 4, weights: str = "a") -> Sheet:
    texts = np.arange(rows * 9, dtype=np.uint8).reshape(rows, 9) + (100 if split == "prior" else 0)
    subject = Subject(expert=expert, weights=weights * 64, domain=domain, split=split)
    return Sheet(subject, np.full((rows, 8), value, dtype=np.float32), row_hashes(texts))


def sheets() -> list[Sheet]:
    """Each expert is better on its own domain; nobody has one for "other"."""
    values = {("a", "a"): -1.0, ("a", "b"): -4.0, ("b", "a"): -3.0, ("b", "b"): -2.0}
    splits: tuple[Split, Split] = ("prior", "test")
    return [
        sheet(expert, domain, split, values.get((expert, domain), -3.5), weights=expert)
        for expert in "ab"
        for domain in ("a", "b", "other")
        for split in splits
    ]


def test_experts_are_in_the_order_in_which_they_come() -> None:
    assert experts_of(sheets()) == ["a", "b"]
    assert experts_of(sheets()[::-1]) == ["b", "a"]


def test_every_domain_has_what_all_experts_gave_it() -> None:
    found = gather(sheets())
    assert list(found) == ["a", "b", "other"]
    assert found["b"].test.shape == (2, 4, 8)
    assert found["b"].test[:, 0, 0].tolist() == [-4.0, -2.0]
    assert found["b"].test_rows.tolist() != found["b"].prior_rows.tolist()


Change = Callable[[list[Sheet]], list[Sheet]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda all_of: all_of[:-1], "the expert of b was not scored on test rows of other"),
        (lambda all_of: [each for each in all_of if each.subject.split != "prior"], "not scored on prior rows of a"),
        (lambda all_of: [*all_of[:-1], sheet("b", "other", "test", -3.5, 5, "b")], "unlike test rows of other"),
        (lambda all_of: [*all_of, sheet("a", "c", "test", -1.0, weights="f")], "two experts of a were scored"),
    ],
)
def test_what_does_not_fit_together_is_said(change: Change, said: str) -> None:
    with pytest.raises(PierError, match=said):
        evaluated(change(sheets()))


def test_a_report_has_every_domain_and_means_of_those_with_and_without_experts() -> None:
    report = evaluated(sheets())
    assert report.experts == ["a", "b"]
    own = {domain: result.experts for domain, result in report.domains.items()}
    assert own["a"] == pytest.approx([1 / np.log(2), 3 / np.log(2)])
    assert [report.domains[domain].single for domain in "ab"] == [0, 1]
    names = list(report.mean)
    assert names == ["decay", "fixed-share", "bayes", "uniform", "top-1", "top-2", "single", "geometric"]
    for name, standing in report.mean.items():
        each = {domain: result.standings[name].bits_per_byte for domain, result in report.domains.items()}
        assert standing.bits_per_byte == pytest.approx((each["a"] + each["b"]) / 2)
        assert report.excluded[name].bits_per_byte == pytest.approx(each["other"])
    assert list(evaluated(sheets(), top_k=2).mean)[4:] == ["top-2", "single", "geometric"]
