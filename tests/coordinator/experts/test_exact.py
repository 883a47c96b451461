from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coordinator.experts.cases import job, uniform

from pier_coordinator.experts.exact import Limits, solved
from pier_coordinator.experts.problem import Problem, makespan

EXACT = Limits(30.0, 0.0)


def test_jobs_of_a_kind_are_counted_and_all_are_placed() -> None:
    problem = uniform(*[job("M", 400)] * 9)
    found = solved(problem, 19034.0, 40000.0, EXACT)
    assert found.places is not None
    assert sorted(found.places) == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert round(makespan(problem, found.places)) == 21148 == round(found.bound)


def test_a_problem_without_a_schedule_has_none() -> None:
    problem = replace(Problem.uniform([2.0, 2.0, 2.0], [1.0, 1.0]), windows=np.array([3.0, 3.0]))
    found = solved(problem, 3.0, 100.0, EXACT)
    assert found.places is None
    assert found.bound == np.inf


def test_nothing_better_than_what_is_known_is_no_schedule() -> None:
    """The best takes 4; asked for 3 at most."""
    found = solved(Problem.uniform([2.0, 2.0, 2.0], [1.0, 1.0]), 3.0, 3.5, EXACT)
    assert found.places is None


def test_no_time_still_gives_a_bound() -> None:
    random = np.random.default_rng(0)
    problem = Problem.uniform(random.uniform(1, 2, 60).tolist(), random.uniform(1, 2, 12).tolist())
    found = solved(problem, 1.0, 1000.0, Limits(0.01, 0.0))
    assert 1.0 <= found.bound < np.inf


def test_units_do_not_matter() -> None:
    """Seconds, or millions of them."""
    for unit in (1e-6, 1.0, 1e9):
        problem = Problem.uniform([3.0 * unit, 3.0 * unit, 2.0 * unit, 2.0 * unit, 2.0 * unit], [1.0, 1.0])
        found = solved(problem, 6.0 * unit, 9.0 * unit, EXACT)
        assert found.places is not None
        assert makespan(problem, found.places) == pytest.approx(6.0 * unit)
