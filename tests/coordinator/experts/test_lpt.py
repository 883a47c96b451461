from __future__ import annotations

from dataclasses import replace

import numpy as np
from coordinator.experts.cases import job, uniform
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.experts.problem import Problem, is_valid
from pier_coordinator.experts.search import longest_first


def test_the_longest_comes_first_and_goes_where_it_is_done_first() -> None:
    """500 steps at the fastest site, 400 at the next one; 300 wait for the fastest."""
    assert longest_first(uniform(job("M", 300), job("M", 400), job("M", 500))) == (2, 1, 2)


def test_among_equals_the_one_with_less_choice_is_first() -> None:
    problem = Problem.uniform([1.0, 1.0], [1.0, 1.0]).restricted(np.array([[True, True], [True, False]]))
    assert longest_first(problem) == (1, 0)


def test_the_first_site_is_taken_where_it_does_not_matter() -> None:
    assert longest_first(Problem.uniform([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])) == (0, 1, 2)


@given(
    st.lists(st.floats(1, 20), min_size=1, max_size=20),
    st.lists(st.floats(1, 4), min_size=1, max_size=6),
    st.floats(5, 100),
)
def test_what_it_finds_is_valid(work: list[float], speeds: list[float], window: float) -> None:
    problem = replace(Problem.uniform(work, speeds), windows=np.full(len(speeds), window))
    found = longest_first(problem)
    assert found is None or is_valid(problem, found)
