from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.problem import Places, Problem, is_valid, makespan
from pier_coordinator.experts.search import cost, improved, settled


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, Places]:
    """A problem and any valid schedule."""
    work = draw(st.lists(st.floats(1, 20), min_size=1, max_size=10))
    speeds = draw(st.lists(st.floats(1, 4), min_size=2, max_size=4))
    problem = Problem.uniform(work, speeds)
    eligible = np.array(draw(st.lists(st.booleans(), min_size=problem.times.size, max_size=problem.times.size)))
    eligible = eligible.reshape(problem.times.shape)
    eligible[:, 0] = True
    problem = problem.restricted(eligible)
    return problem, tuple(draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in eligible)


@given(placed())
@settings(deadline=None)
def test_a_search_ends_no_later_and_what_it_finds_is_valid(given_: tuple[Problem, Places]) -> None:
    problem, places = given_
    found = improved(problem, places)
    assert is_valid(problem, found)
    assert makespan(problem, found) <= makespan(problem, places) * (1 + 1e-9)
    assert improved(problem, found) == found


@given(placed())
@settings(deadline=None)
def test_settling_delays_nobody_and_costs_less(given_: tuple[Problem, Places]) -> None:
    problem, places = given_
    found, sites = settled(problem, places), set(range(len(problem.speeds)))
    assert is_valid(problem, found)
    assert makespan(problem, found) <= makespan(problem, places) * (1 + 1e-8)
    assert cost(problem, found, sites)[0] <= cost(problem, places, sites)[0] * (1 + 1e-8)


def test_a_move_and_a_swap_are_found() -> None:
    equal = Problem.uniform([3.0, 3.0, 2.0, 2.0], [1.0, 1.0])
    assert makespan(equal, improved(equal, (0, 0, 0, 0))) == 5.0
    assert makespan(equal, improved(equal, (0, 0, 1, 1))) == 5.0, "only a swap helps"


def test_a_window_is_kept() -> None:
    problem = replace(Problem.uniform([3.0, 3.0], [1.0, 2.0]), windows=np.array([9.0, 2.0]))
    assert improved(problem, (0, 0)) == (1, 0)


def test_the_cost_is_of_the_shortest_first() -> None:
    problem = Problem.uniform([4.0, 1.0], [1.0, 2.0])
    assert cost(problem, (0, 0), {0, 1}) == pytest.approx((1 + 5, 5 / 2))
    assert cost(problem, (1, 1), {1}) == pytest.approx((0.5 + 2.5, 2.5 / 2))
    assert cost(problem, (1, 1), {0}) == (0, 0)
