from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rounds.cases import LENGTH, Member, fp32, scene
from rounds.exchanges import Exchange, vectors
from simulation.network import Network
from simulation.virtual_time import run

from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.mean import (
    EXACT,
    LIMIT,
    LONGEST,
    ONE_EACH,
    Weighing,
    capped,
    clip_factors,
    longest_mean,
    longest_updates,
    median_norm,
    relative_weights,
    trimmed_mean,
    usual_tokens,
    weighing,
    weighted_mean,
)
from pier_node.outer.schedule import total_rounds
from pier_node.rounds.suspects import Suspicion

FINITE = st.floats(-1e6, 1e6, width=32)


def mean(vectors: list[Vector], tokens: list[int]) -> Vector:
    out = np.full(len(vectors[0]), np.nan, np.float32)
    weighted_mean(vectors, relative_weights(tokens), out=out)
    return out


def test_golden() -> None:
    np.testing.assert_allclose(mean([fp32(1, -2), fp32(4, 4)], [100, 50]), [2.0, 0.0], rtol=1e-6)


@given(st.integers(1, 8), st.integers(1, 2**52), st.data())
def test_equal_tokens_give_the_plain_mean_to_the_last_bit(count: int, tokens: int, data: st.DataObject) -> None:
    vectors = [data.draw(arrays(np.float32, 5, elements=FINITE)) for _ in range(count)]
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total = total + vector
    assert mean(vectors, [tokens] * count).tobytes() == (total / np.float32(count)).tobytes()


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=6), st.data())
def test_is_the_weighted_mean(tokens: list[int], data: st.DataObject) -> None:
    vectors = [data.draw(arrays(np.float32, 4, elements=FINITE)) for _ in tokens]
    expected = np.average(np.array(vectors, np.float64), axis=0, weights=tokens)
    scale = max(float(np.abs(vector).max()) for vector in vectors)
    np.testing.assert_allclose(mean(vectors, tokens), expected, atol=4e-6 * scale + 1e-30)


def test_nobody_means_zero() -> None:
    out = fp32(1, 2)
    weighted_mean([], [], out=out)
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "weights"), [([], []), ([0, 0], [0, 0]), ([5], [1]), ([3, 0, 3], [1, 0, 1]), ([1, 4], [0.25, 1])]
)
def test_relative_weights(tokens: list[int], weights: list[float]) -> None:
    assert [float(weight) for weight in relative_weights(tokens)] == weights


def test_whoever_has_a_token_has_a_weight() -> None:
    assert relative_weights([1, 2**53 - 1])[0] > 0


# --- trimmed -----------------------------------------------------------------------------------


def trimmed(values: list[float], tokens: list[int]) -> float:
    out = fp32(np.nan)
    trimmed_mean([fp32(value) for value in values], relative_weights(tokens), out)
    return float(out[0])


@pytest.mark.parametrize(
    ("values", "tokens", "mean"),
    [
        ([1, 2, 30], [5, 5, 5], 2),
        ([30, 1, 2, 4], [5, 5, 5, 5], 3),
        ([-1e6, 1, 2, 3, 1e6], [1] * 5, 2),
        ([1, 2, 30], [1, 1, 4], 30),
        ([1, 2, 1e6], [99, 99, 2], 1.515),
        ([1, 3], [7, 7], 2),
        ([1, 3], [99, 1], 1),
        ([4], [7], 4),
    ],
)
def test_the_middle_third(values: list[float], tokens: list[int], mean: float) -> None:
    assert trimmed(values, tokens) == pytest.approx(mean, rel=1e-5)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 100)), min_size=1, max_size=9))
def test_is_the_mean_of_the_middle_third_of_single_tokens(sites: list[tuple[float, int]]) -> None:
    ranked = sorted(value for value, tokens in sites for _ in range(3 * tokens))
    third = len(ranked) // 3
    values, tokens = zip(*sites, strict=True)
    assert trimmed(list(values), list(tokens)) == pytest.approx(np.mean(ranked[third:-third]), rel=1e-3, abs=0.1)


@given(st.integers(2, 7), st.floats(-1e30, 1e30), st.integers(0, 2**32))
def test_less_than_a_third_of_the_tokens_cannot_leave_the_range_of_the_others(
    count: int, evil: float, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    honest = dice.standard_normal(count).tolist()
    tokens = dice.integers(1, 50, count).tolist()
    result = trimmed([*honest, evil], [*tokens, max(1, sum(tokens) // 2 - 1)])
    assert min(honest) - 1e-4 <= result <= max(honest) + 1e-4


def test_nobody_trimmed_means_zero() -> None:
    out = fp32(1, 2)
    trimmed_mean([], [], out)
    assert out.tolist() == [0, 0]


MEMBERS = st.lists(st.tuples(st.just(0.0) | st.floats(1e-6, 1e6), st.integers(0, 2**40)), min_size=1, max_size=9)
COUNTS = st.integers(0, 2**53 - 1)


@pytest.mark.parametrize(
    ("norms", "tokens", "median"),
    [
        ([2, 4, 9], [1, 1, 1], 4),
        ([2, 4, 9], [1, 1, 2], 4),
        ([2, 4, 9], [1, 1, 3], 4),
        ([2, 4, 9], [1, 1, 2**52], 4),
        ([2, 9, 9], [1, 4, 2**52], 9),
        ([5, 9], [1, 2**52], 5),
        ([4, 400], [99, 1], 4),
        ([4, 400], [1, 1], 4),
        ([0, 5], [10, 1], 5),
        ([7, 5], [0, 0], 0),
        ([], [], 0),
    ],
)
def test_the_median_is_that_of_the_tokens_but_nobody_decides_it(
    norms: list[float], tokens: list[int], median: float
) -> None:
    assert median_norm(norms, tokens) == median


def test_only_what_is_much_longer_than_usual_is_clipped() -> None:
    assert clip_factors([1, 1, 2.9, 30], [10, 10, 10, 1], 10) == [1, 1, 1, pytest.approx(0.1)]
    assert clip_factors([1, 1, 30], [10, 10, 0], 10) == [1, 1, 1]


def test_who_did_more_steps_may_bring_more_up_to_a_whole_round() -> None:
    assert clip_factors([8, 1, 1], [8, 1, 1], whole=8) == [1, 1, 1], "honest sites, one of which is eight times as fast"
    assert clip_factors([48, 1, 1], [2**52, 1, 1], whole=8) == [pytest.approx(0.5), 1, 1]
    assert clip_factors([10, 1, 1], [2**52, 8, 8], whole=8) == [pytest.approx(0.3), 1, 1]


@given(MEMBERS, st.integers(1, 2**40))
def test_after_it_none_is_longer_than_three_times_the_median_for_its_tokens(
    members: list[tuple[float, int]], whole: int
) -> None:
    norms, tokens = zip(*members, strict=True)
    factors, longest = clip_factors(norms, tokens, whole), longest_updates(norms, tokens, whole)
    for norm, count, factor, limit in zip(norms, tokens, factors, longest, strict=True):
        assert 0 < factor <= 1
        assert not count or norm * factor <= limit * EXACT * 1.0001
        assert factor == 1 or norm > limit >= LONGEST * median_norm(norms, tokens)


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.integers(1, 8)), min_size=2, max_size=9), st.floats(0, 1e30), COUNTS)
def test_one_member_cannot_move_the_limit_beyond_what_honest_norms_are(
    honest: list[tuple[float, int]], norm: float, claim: int
) -> None:
    norms, tokens = zip(*honest, strict=True)
    assert median_norm([*norms, norm], [*tokens, claim]) <= max(norms)
    assert max(longest_updates([*norms, norm], [*tokens, claim], whole=8)) <= LONGEST * max(norms) * 8


@given(MEMBERS, st.integers(0, 100))
def test_no_mean_is_longer_than_it_can_be(members: list[tuple[float, int]], seed: int) -> None:
    norms, tokens = (list(it) for it in zip(*members, strict=True))
    dice, givers = np.random.default_rng(seed), [number for number, count in enumerate(tokens) if count]
    given = [_of_length(dice.standard_normal(6, np.float32), norms[number]) for number in givers]
    factors = clip_factors(norms, tokens, 2**30)
    clipped = [vector * np.float32(factors[number]) for vector, number in zip(given, givers, strict=True)]
    mean = np.zeros(6, np.float32)
    trimmed_mean(clipped, [np.float32(tokens[number] / max(tokens)) for number in givers], mean)
    assert np.linalg.norm(mean) <= longest_mean(norms, tokens, 2**30) * EXACT + 1e-30


def _of_length(values: Vector, norm: float) -> Vector:
    return (values / np.linalg.norm(values) * norm).astype(np.float32)


# --- in an attempt -----------------------------------------------------------------------------

TOKENS = {"a": 99, "b": 99, "c": 2}


def shift(of_c: Vector, rule: str) -> float:
    """By how much the model moves because of c, which has 1 % of the tokens."""

    async def mean(last: Vector) -> Vector:
        exchange = Exchange({**vectors("ab", LENGTH), "c": last}, TOKENS, norms={}, rule=rule)
        await exchange.run()
        return exchange.means["b"]

    return float(np.linalg.norm(run(mean(of_c)) - run(mean(np.zeros(LENGTH, np.float32)))))


async def suspected(of_c: Vector, norms: dict[str, float], made_up: float | None = None) -> Suspicion:
    """Whom a suspects; c may make up the mean of its shard."""
    exchange = Exchange({**vectors("ab", LENGTH), "c": of_c}, TOKENS, norms=norms)
    if made_up is not None:
        exchange.parts["c"].rule = lambda parts, weights, out: out.fill(made_up)
    suspicion = await exchange.outcome("a")
    assert suspicion is not None
    return suspicion


def move_of_an_honest_site() -> float:
    return float(np.linalg.norm(vectors("ab", LENGTH)["a"])) * 99 / 200


@pytest.mark.parametrize("rule", ["none", "trimmed"])
@pytest.mark.parametrize("length", [10.0, 1e3, 1e5])
def test_a_site_with_one_percent_of_the_tokens_moves_the_model_less_than_an_honest_one(
    rule: str, length: float
) -> None:
    adversarial = -length * vectors("ab", LENGTH)["a"]
    assert 0 < shift(adversarial, rule) < 0.1 * move_of_an_honest_site()


def test_without_clipping_it_would_move_it_by_more() -> None:
    adversarial = -1e3 * vectors("ab", LENGTH)["a"]
    assert np.linalg.norm(adversarial) * 2 / 200 > 9 * move_of_an_honest_site()


def test_whoever_sends_more_than_it_announced_is_named() -> None:
    suspicion = run(suspected(1e3 * fp32(*range(LENGTH)), {"c": 3.0}))
    assert suspicion.node == "c"
    assert "its norm is above 3" in suspicion.reason


def test_an_owner_that_makes_up_its_mean_is_named() -> None:
    suspicion = run(suspected(fp32(*range(LENGTH)), {}, made_up=1e3))
    assert suspicion.node == "c"
    assert "a mean that is not finite, or of a norm above" in suspicion.reason


CLAIMS = st.integers(0, 2**63)


@pytest.mark.parametrize(
    ("tokens", "usual"), [([], 0), ([0, 0], 0), ([5], 5), ([9, 0, 1], 1), ([3, 1, 2], 2), ([4, 1, 2, 3], 2)]
)
def test_usual_is_the_lower_median_of_who_brings_anything(tokens: list[int], usual: int) -> None:
    assert usual_tokens(tokens) == usual


@pytest.mark.parametrize(
    ("tokens", "weights"),
    [
        ([8, 8, 8], [8, 8, 8]),
        ([8, 1, 1], [8, 1, 1]),  # honest sites, one of which is eight times as fast
        ([2**52, 8, 8], [16, 8, 8]),
        ([2**52, 1, 1], [8, 1, 1]),
        ([2**52, 8], [16, 8]),
        ([8, 1], [8, 1]),
        ([24, 8, 8], [16, 8, 8]),  # it missed two rounds
        ([2**52], [2**52]),
        ([0, 0], [0, 0]),
    ],
)
def test_nobody_weighs_more_than_twice_the_usual_or_a_whole_round(tokens: list[int], weights: list[float]) -> None:
    assert capped(tokens, whole=8, most=2.0) == [
        min(weight, count) for weight, count in zip(weights, tokens, strict=True)
    ]


@given(st.lists(st.integers(1, 8), min_size=2, max_size=9), CLAIMS)
def test_a_liar_has_at_most_two_thirds_of_the_weight_among_equals(honest: list[int], claim: int) -> None:
    equal = capped([8] * len(honest) + [claim], whole=8, most=2.0)
    assert equal[-1] <= 2 / (2 + len(honest)) * sum(equal) * 1.000001
    assert capped(honest, whole=8, most=2.0) == honest, "who trained does not lose weight"


@given(st.integers(1, 10**6), st.lists(CLAIMS, max_size=20))
def test_a_ledger_never_exceeds_what_could_be_trained_on(allowed: int, claims: list[int]) -> None:
    bounds, counted = Weighing(allowed=allowed), 0
    for claim in claims:
        counted += bounds.believed({"a": claim}, {"a": counted})["a"]
        assert counted <= min(allowed, sum(claims))


@given(st.lists(st.just(LIMIT) | CLAIMS, max_size=20))
def test_no_run_is_long_enough_for_a_ledger_to_overflow(claims: list[int]) -> None:
    counted = 0
    for claim in claims:
        counted += Weighing().believed({"a": claim}, {"a": counted})["a"]
    assert counted == min(sum(claims), LIMIT)


def test_fragments_are_counted_apart() -> None:
    bounds = Weighing(allowed=10, fragment=2)
    assert bounds.believed({"a": 9, "b": 9}, {"a": 10, "a/2": 4, "b/1": 10}) == {"a": 6, "b": 9}


def test_members_that_come_count_alike() -> None:
    assert ONE_EACH.believed({"a": 1, "b": 2**52, "c": 0}, {"a": 7}) == {"a": 1, "b": 1, "c": 0}


def config(**outer: object) -> RunConfig:
    inner = {"total_steps": 100, "batch_size": 4}
    return RunConfig.model_validate({"run": {"sites": 3}, "model": {"context": 16}, "inner": inner, "outer": outer})


@pytest.mark.parametrize(
    ("outer", "number", "allowed", "whole"),
    [
        ({"algorithm": "diloco", "inner_steps": 10}, 1, 640, 640),
        ({"algorithm": "diloco", "inner_steps": 10}, 3, 1920, 640),
        ({"algorithm": "diloco", "inner_steps": 10, "fragments": 2}, 3, 960, 640),
        ({"algorithm": "sync"}, 5, 320, 64),
        ({"inner_steps": 10}, 1, 1920, 640),  # alone, with the batch of three sites
        ({"inner_steps": 10}, 3, 1920 + 2 * 640, 640),
    ],
)
def test_a_site_cannot_have_trained_on_more_than_the_run_has_steps_for(
    outer: dict[str, object], number: int, allowed: int, whole: int
) -> None:
    bounds = weighing(config(**outer), number)
    assert (bounds.allowed, bounds.whole, bounds.most) == (allowed, whole, 2.0)


def test_the_longest_run_stays_within_what_a_manifest_holds() -> None:
    huge = RunConfig.model_validate(
        {"inner": {"total_steps": 2**40, "batch_size": 2**20}, "outer": {"inner_steps": 2**20, "max_weight": 8}}
    )
    bounds = weighing(huge, total_rounds(huge))
    assert (bounds.allowed, bounds.most) == (LIMIT, 8)
    assert math.isfinite(sum(capped([LIMIT] * 1024, bounds.whole, bounds.most)))


# --- in rounds ---------------------------------------------------------------------------------


def bounded(members: dict[str, Member]) -> None:
    for member in members.values():
        member.tools.weighing = lambda number: Weighing(allowed=100 * number, whole=100, most=2.0)


def test_a_claim_of_many_tokens_does_not_take_the_model() -> None:
    async def play(_network: Network, members: dict[str, Member]) -> None:
        bounded(members)
        works = [members["a"].contribute(1.0, 100), members["b"].contribute(1.0, 100)]
        works.append(members["c"].contribute(-10.0, 2**53 - 1))
        states = await asyncio.gather(*works)
        assert len({state.digest for state in states}) == 1
        assert states[0].ledger == {"a": 100, "b": 100, "c": 100}
        # c weighs as much as they do, and its update is shortened to three times theirs
        assert states[0].anchor == pytest.approx(np.full(LENGTH, (1 + 1 - 3) / 3), abs=1e-5)

    scene(play)


def test_claims_add_up_to_nothing_that_cannot_be_sent() -> None:
    async def play(_network: Network, members: dict[str, Member]) -> None:
        for _ in range(3):
            works = [member.contribute(1.0, 2**53 - 1) for member in members.values()]
            states = await asyncio.gather(*works)
        assert states[0].ledger == dict.fromkeys("abc", LIMIT)
        for member in members.values():
            member.tools.weighing = lambda _: ONE_EACH
        with pytest.raises(asyncio.TimeoutError):
            raise TimeoutError

    scene(play)
