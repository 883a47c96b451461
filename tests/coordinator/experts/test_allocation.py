"""Stage A: property 10's last part, and water that finds its level."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from coordinator.experts.cases import SIZES, curves
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.allocation import Allocation, Allowed, BudgetError, allocated, filled
from pier_coordinator.experts.difficulty import Curves

PARAMETERS = np.array([size.parameters for size in SIZES])
FLOPS = np.array([size.flops for size in SIZES])
USUAL = 2.75e8


def allowed(domains: int, budget: float = 1.0, least: float = 1e8, most: float = 1e12) -> Allowed:
    """`budget` as a multiple of M with the usual tokens everywhere."""
    whole = budget * domains * FLOPS[1] * USUAL
    return Allowed(
        PARAMETERS, FLOPS, np.full(domains, least), np.full(domains, most), whole, np.ones((domains, 3), bool)
    )


def cost(found: Allocation) -> float:
    return float((FLOPS[found.sizes] * found.tokens).sum())


def test_fixed_sizes_have_the_closed_form() -> None:
    """T0 + T_j ∝ (v_j B_j / F_j)^(1/(1+β)) where nothing is at its bound."""
    law, flops = curves(5), FLOPS[[0, 1, 2, 1, 0]]
    gain = law.data
    tokens = filled(gain, flops, law, np.zeros(5), np.full(5, 1e12), 5 * FLOPS[1] * USUAL)
    ratio = (law.warm + tokens) / (gain / flops) ** (1 / (1 + law.beta))
    assert ratio == pytest.approx(ratio.mean(), rel=1e-6)
    assert (tokens * flops).sum() == pytest.approx(5 * FLOPS[1] * USUAL, rel=1e-9)


@given(st.integers(0, 200), st.floats(0.5, 2))
@settings(max_examples=30, deadline=None)
def test_no_transfer_of_1_percent_is_better(seed: int, budget: float) -> None:
    law, domains = curves(4, seed), 4
    bounds = allowed(domains, budget)
    found = allocated(law, np.ones(domains), bounds)
    assert cost(found) == pytest.approx(bounds.budget, rel=1e-6)
    for giver, taker in permutations(range(domains), 2):
        moved = 0.01 * found.tokens[giver]
        tokens = found.tokens.copy()
        tokens[giver] -= moved
        tokens[taker] += moved * FLOPS[found.sizes[giver]] / FLOPS[found.sizes[taker]]
        if tokens[giver] >= bounds.least[giver]:
            assert law.loss(PARAMETERS[found.sizes], tokens).sum() >= found.loss * (1 - 1e-9)


@given(st.integers(0, 200))
@settings(max_examples=10, deadline=None)
def test_no_other_sizes_are_better(seed: int) -> None:
    law, bounds = curves(3, seed), allowed(3)
    found = allocated(law, np.ones(3), bounds)
    for sizes in product(range(3), repeat=3):
        flops = FLOPS[[*sizes]]
        tokens = filled(law.data, flops, law, bounds.least, bounds.most, bounds.budget)
        assert law.loss(PARAMETERS[[*sizes]], tokens).sum() >= found.loss * (1 - 1e-9)


def test_bounds_are_kept() -> None:
    law = curves(4)
    bounds = replace(allowed(4), least=np.full(4, 2e8), most=np.array([2.2e8, 1e12, 1e12, 2.5e8]))
    found = allocated(law, np.array([100.0, 1.0, 1.0, 1e-6]), bounds)
    assert found.tokens[0] == pytest.approx(2.2e8, rel=1e-6)
    assert found.tokens[3] == pytest.approx(2e8, rel=1e-3)
    assert cost(found) <= bounds.budget * (1 + 1e-9)


def test_a_budget_that_the_texts_are_too_short_for_is_not_spent() -> None:
    found = allocated(curves(3), np.ones(3), allowed(3, budget=10, most=3e8))
    assert found.tokens == pytest.approx(3e8)


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(BudgetError) as caught:
        allocated(curves(3), np.ones(3), allowed(3, budget=0.1))
    assert caught.value.needed == pytest.approx(3 * FLOPS[0] * 1e8)


def test_greedy_changes_are_nearly_as_good_as_trying_all(monkeypatch: pytest.MonkeyPatch) -> None:
    law, bounds = curves(7, seed=5), allowed(7)
    best = allocated(law, np.ones(7), bounds)
    monkeypatch.setattr("pier_coordinator.experts.allocation.ALL", 1)
    greedy = allocated(law, np.ones(7), bounds)
    assert greedy.loss == pytest.approx(best.loss, rel=1e-4)


def test_a_domain_that_nothing_helps_gets_the_least() -> None:
    law = Curves(np.ones(3), np.array([0.0, 100, 100]), np.array([0.0, 100, 100]), 0.34, 0.28, 1e8)
    found = allocated(law, np.ones(3), allowed(3))
    assert found.sizes[0] == 0
    assert found.tokens[0] == pytest.approx(1e8)


def test_64_domains() -> None:
    bounds = allowed(64)
    found = allocated(curves(64), np.ones(64), bounds)
    assert cost(found) == pytest.approx(bounds.budget, rel=1e-6)


@pytest.mark.parametrize("all_combinations", [True, False])
def test_sizes_that_fit_nowhere_are_not_chosen(monkeypatch: pytest.MonkeyPatch, all_combinations: bool) -> None:
    if not all_combinations:
        monkeypatch.setattr("pier_coordinator.experts.allocation.ALL", 1)
    law = replace(curves(4), size=np.full(4, 5000.0))
    assert allocated(law, np.ones(4), allowed(4)).sizes.tolist() == [2, 2, 2, 2]
    fits = np.array([[True, True, True], [True, True, False], [True, False, False], [True, True, True]])
    assert allocated(law, np.ones(4), replace(allowed(4), fits=fits)).sizes.tolist() == [2, 1, 0, 2]
