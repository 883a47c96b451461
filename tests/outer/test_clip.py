from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import LENGTH, fp32
from rounds.exchanges import Exchange, vectors
from simulation.virtual_time import run

from pier_node.base.shared import Vector
from pier_node.outer.clip import EXACT, LONGEST, clip_factors, longest_mean, longest_updates, median_norm
from pier_node.outer.mean import trimmed_mean
from pier_node.rounds.suspects import Suspicion

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
        exchange.parts["c"]._rule = lambda parts, weights, out: out.fill(made_up)
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
