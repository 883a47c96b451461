from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.bounds import area, longest, nested, prefix, relaxed
from pier_coordinator.experts.problem import Problem


def test_each_bound_by_hand() -> None:
    problem = Problem.uniform([6.0, 2.0, 1.0], [1.0, 2.0])
    assert area(problem) == 3.0
    assert longest(problem) == 3.0
    assert prefix(problem) == 3.0, "6 at the faster site"
    assert prefix(Problem.uniform([6.0, 6.0, 1.0], [1.0, 1.0, 2.0])) == 4.0, "6 and 6 at speeds 2 and 1"
    assert nested(problem.restricted(np.array([[True, False], [True, True], [True, True]]))) == 6.0


def test_the_relaxation_does_not_cut_jobs_where_the_whole_does_not_fit() -> None:
    """One job, two equal sites: half at each would take 0.5."""
    assert relaxed(Problem.uniform([1.0], [1.0, 1.0])) == pytest.approx(1.0)
    assert relaxed(Problem.uniform([1.0] * 3, [1.0, 1.0])) == pytest.approx(1.5)


def test_the_relaxation_lies_between_two_times_where_these_are_not_enough() -> None:
    """Places of 1 s are not enough within 1 s, and 3 jobs on 2 sites take 1.5 s although 10 s are allowed."""
    problem = Problem.uniform([1.0, 1.0, 1.0, 10.0], [1.0, 1.0, 100.0])
    assert relaxed(problem) <= 1.0


@given(
    st.lists(st.floats(1, 20), min_size=1, max_size=8),
    st.lists(st.floats(1, 4), min_size=1, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_the_relaxation_is_no_worse_than_area_and_longest(work: list[float], speeds: list[float]) -> None:
    problem = Problem.uniform(work, speeds)
    assert relaxed(problem) >= max(area(problem), longest(problem)) * (1 - 1e-6)


def test_windows_that_are_too_short_for_all_jobs_have_no_schedule() -> None:
    problem = replace(Problem.uniform([2.0, 2.0, 2.0], [1.0]), windows=np.array([5.0]))
    assert relaxed(problem) == np.inf
