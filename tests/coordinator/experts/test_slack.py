"""Stage C by itself; test_plan.py has it in a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coordinator.experts.cases import FLOPS, SITES, STEP, curves, task
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.jobs import jobs, problem
from pier_coordinator.experts.problem import loads
from pier_coordinator.experts.recipe import Recipe
from pier_coordinator.experts.slack import steps_until, stretched
from pier_coordinator.experts.task import Site


def medium(count: int) -> Recipe:
    return Recipe(np.full(count, 1), np.full(count, 400), np.arange(count))


@given(st.integers(0, 100), st.lists(st.integers(0, 2), min_size=2, max_size=9))
@settings(max_examples=30, deadline=None)
def test_every_site_at_work_is_busy_until_the_end_and_no_longer(seed: int, places: list[int]) -> None:
    asked, made = task(len(places)), medium(len(places))
    end = float(loads(problem(jobs(asked, made), SITES), tuple(places)).max())
    steps = steps_until(asked, curves(len(places), seed), made, tuple(places), SITES, end, made.steps)
    assert (steps >= made.steps).all()
    after = loads(problem(jobs(asked, replace(made, steps=steps)), SITES), tuple(places))
    a_step = [FLOPS["M"] * STEP / site.speed for site in SITES]
    for site in set(places):
        assert end - a_step[site] * 1.01 <= after[site] <= end * (1 + 1e-6)


def test_what_gains_more_gets_more_of_a_sites_time() -> None:
    law = replace(curves(2), data=np.array([50.0, 400.0]))
    steps = steps_until(task(2), law, medium(2), (2, 2), SITES, 20_000.0, np.array([100, 100]))
    assert steps[1] > steps[0] >= 100


def test_a_line_takes_its_part_of_the_time() -> None:
    slow = [Site("a", 3e13, line=1.25e7)]
    fast = [Site("a", 3e13)]
    of_slow, of_fast = (
        steps_until(task(1), curves(1), medium(1), (0,), sites, 20_000.0, np.array([1])) for sites in (slow, fast)
    )
    assert (of_fast - of_slow)[0] == pytest.approx(96 * 3e13 / (FLOPS["M"] * STEP), abs=1.01)


def test_setup_takes_its_part_of_the_time() -> None:
    lean, full = (
        steps_until(task(2, setup=setup), curves(2), medium(2), (0, 0), SITES, 20_000.0, np.array([1, 1]))
        for setup in (0.0, 1000.0)
    )
    assert (lean - full).sum() == pytest.approx(2000 * 3e13 / (FLOPS["M"] * STEP), abs=2.01)


def test_a_site_that_leaves_early_is_done_by_then() -> None:
    sites = [replace(SITES[2], window=4230.0)]
    steps = steps_until(task(1), curves(1), medium(1), (0,), sites, 99_999.0, np.array([1]))
    assert steps.tolist() == [400]


def test_steps_that_a_site_cannot_do_are_fewer_but_one_at_least() -> None:
    steps = steps_until(task(2), curves(2), medium(2), (0, 0), SITES, 3172.5, np.array([300, 300]))
    assert steps.sum() == 100
    none = steps_until(task(1), curves(1), medium(1), (0,), SITES, 0.0, np.array([300]))
    assert none.tolist() == [1]


def test_one_factor_for_all_and_the_last_site_ends_in_time() -> None:
    made = stretched(task(3), medium(3), (0, 1, 2), SITES, 6344.6)
    assert made.steps.tolist() == [200, 200, 200], "the slowest site decides"
