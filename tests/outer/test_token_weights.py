"""What claims of tokens are worth."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import LENGTH, Member, scene
from simulation.network import Network

from pier_node.config.run import RunConfig
from pier_node.outer.schedule import total_rounds
from pier_node.outer.token_weights import LIMIT, ONE_EACH, Weighing, capped, usual_tokens, weighing

COUNTS = st.integers(0, 2**63)


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


@given(st.lists(st.integers(1, 8), min_size=2, max_size=9), COUNTS)
def test_a_liar_has_at_most_two_thirds_of_the_weight_among_equals(honest: list[int], claim: int) -> None:
    equal = capped([8] * len(honest) + [claim], whole=8, most=2.0)
    assert equal[-1] <= 2 / (2 + len(honest)) * sum(equal) * 1.000001
    assert capped(honest, whole=8, most=2.0) == honest, "who trained does not lose weight"


@given(st.integers(1, 10**6), st.lists(COUNTS, max_size=20))
def test_a_ledger_never_exceeds_what_could_be_trained_on(allowed: int, claims: list[int]) -> None:
    bounds, counted = Weighing(allowed=allowed), 0
    for claim in claims:
        counted += bounds.believed({"a": claim}, {"a": counted})["a"]
        assert counted <= min(allowed, sum(claims))


@given(st.lists(st.just(LIMIT) | COUNTS, max_size=20))
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
