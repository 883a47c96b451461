from __future__ import annotations

import numpy as np
from coordinator.experts.cases import is_valid, job, uniform

from pier_coordinator.experts.problem import Problem, loads, makespan, order


def test_loads_and_makespan_are_of_the_places() -> None:
    problem = uniform(job("M", 300), job("M", 400), job("M", 500))
    assert loads(problem, (0, 2, 2)).round().tolist() == [9517.0, 0.0, 9517.0]
    assert round(makespan(problem, (0, 2, 2))) == 9517


def test_a_site_takes_the_shortest_job_first_and_among_equals_the_first() -> None:
    problem = Problem.uniform([3.0, 1.0, 2.0, 1.0], [1.0])
    assert order(problem, (0, 0, 0, 0), 0) == [1, 3, 2, 0]


def test_what_is_not_allowed_or_too_late_is_not_valid() -> None:
    problem = Problem.uniform([2.0, 1.0], [1.0, 1.0]).restricted(np.array([[True, False], [True, True]]))
    assert is_valid(problem, (0, 1))
    assert not is_valid(problem, (1, 1))
    short = Problem(problem.times, problem.work, problem.speeds, np.array([2.0, np.inf]))
    assert is_valid(short, (0, 1))
    assert not is_valid(short, (0, 0)), "beyond the window"
