"""Schedules of the paper's experts: bounds, LPT, local search and the solver."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from coordinator.experts.cases import is_valid, job, uniform
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.scheduling import (
    Limits,
    NoPlaceError,
    Places,
    Problem,
    area,
    cost,
    improved,
    loads,
    longest,
    longest_first,
    lower_bounds,
    makespan,
    nested,
    order,
    prefix,
    rated,
    relaxed,
    schedule,
    settled,
    solved,
)

EXACT = Limits(60.0, 0.0)


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


MENU = {
    "3x M400": [("M", 400)] * 3,
    "S, M, L": [("S", 400), ("M", 400), ("L", 400)],
    "M at 300, 400, 500": [("M", 300), ("M", 400), ("M", 500)],
    "MHo-IHo": [("M", 400)] * 9,
    "MHe-IHo": [("S", 400), ("M", 400), ("L", 400)] * 3,
    "MHo-IHe": [("M", 300), ("M", 400), ("M", 500)] * 3,
    "rescaled": [("S", 300), ("M", 400), ("L", 500)] * 3,
}


@pytest.mark.parametrize(
    ("jobs", "bound", "optimum", "lpt"),
    [
        ("3x M400", 6345, 8459, 8459),
        ("S, M, L", 6343, 8068, 8456),
        ("M at 300, 400, 500", 6345, 7931, 8459),
        ("MHo-IHo", 19034, 21148, 21148),
        ("MHe-IHo", 19029, 20199, 21142),
        ("MHo-IHe", 19034, 19034, 21148),
        ("rescaled", 19321, 19989, 21325),
    ],
)
def test_table_of_free_placement(jobs: str, bound: int, optimum: int, lpt: int) -> None:
    problem = uniform(*(job(size, steps) for size, steps in MENU[jobs]))
    bounds = lower_bounds(problem)
    assert round(max(bounds["area"], bounds["prefix"])) == bound
    found, quick = schedule(problem, EXACT), longest_first(problem)
    assert quick is not None
    assert (round(found.makespan), round(makespan(problem, quick))) == (optimum, lpt)
    assert found.gap < 1e-6, "proved"


@pytest.mark.parametrize(
    ("jobs", "optimum", "bound"),
    [("MHo-IHo", 25378, 22840), ("MHe-IHo", 21531, 19029), ("MHo-IHe", 23263, 22840), ("rescaled", 20197, 19321)],
)
def test_table_of_nested_memory(jobs: str, optimum: int, bound: int) -> None:
    """M fits at the second and the third site, L at the third."""
    first = {"S": 0, "M": 1, "L": 2}
    eligible = np.array([[site >= first[size] for site in range(3)] for size, _ in MENU[jobs]])
    problem = uniform(*(job(size, steps) for size, steps in MENU[jobs])).restricted(eligible)
    bounds = lower_bounds(problem)
    assert round(max(bounds["nested"], bounds["area"])) == bound
    found = schedule(problem, EXACT)
    assert is_valid(problem, found.places)
    assert round(found.makespan) == optimum
    assert (0 in found.places) == (jobs != "MHo-IHo" and jobs != "MHo-IHe")


PROBLEMS = st.builds(
    Problem.uniform,
    st.lists(st.floats(1, 20), min_size=1, max_size=6),
    st.lists(st.floats(1, 4), min_size=1, max_size=3),
)
MASKS = st.integers(0, 2**18 - 1)


def masked(problem: Problem, mask: int) -> Problem:
    """Jobs may not go where a bit is set, but somewhere each."""
    bits = np.array([mask >> bit & 1 for bit in range(problem.times.size)]).reshape(problem.times.shape)
    bits[:, -1] = 0
    return problem.restricted(bits == 0)


def best(problem: Problem) -> float:
    """Of all schedules."""
    every = product(range(len(problem.speeds)), repeat=len(problem.work))
    return min((makespan(problem, places) for places in every if is_valid(problem, places)), default=np.inf)


@given(PROBLEMS, MASKS)
@settings(max_examples=25, deadline=None)
def test_the_best_schedule_is_found_and_lies_between_its_bounds(problem: Problem, mask: int) -> None:
    problem = masked(problem, mask)
    found, quick, optimum = schedule(problem, EXACT), longest_first(problem), best(problem)
    assert is_valid(problem, found.places)
    assert found.makespan == pytest.approx(optimum, rel=1e-6)
    assert found.bound <= optimum * (1 + 1e-6)
    assert rated(problem, found.places).bound <= optimum * (1 + 1e-6)
    assert quick is not None
    assert found.makespan <= makespan(problem, quick) * (1 + 1e-9)
    assert found.gap == pytest.approx(found.makespan / found.bound - 1)


@given(st.lists(st.floats(1, 20), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_lpt_is_within_4_3_for_equal_sites(work: list[float], sites: int) -> None:
    problem = Problem.uniform(work, [1.0] * sites)
    quick = longest_first(problem)
    assert quick is not None
    assert makespan(problem, quick) <= (4 / 3 - 1 / (3 * sites)) * best(problem) * (1 + 1e-9)


@given(PROBLEMS, st.floats(1, 4))
@settings(max_examples=12, deadline=None)
def test_a_site_or_a_speed_more_never_makes_it_worse(problem: Problem, speed: float) -> None:
    before = schedule(problem, EXACT).makespan
    more = Problem.uniform(problem.work.tolist(), [*problem.speeds, speed])
    faster = Problem.uniform(problem.work.tolist(), [problem.speeds[0] * (1 + speed), *problem.speeds[1:]])
    for changed in (more, faster):
        assert schedule(changed, EXACT).makespan <= before * (1 + 1e-6)


@given(PROBLEMS, MASKS, st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None)
def test_it_is_deterministic_and_the_order_of_sites_changes_ties_only(
    problem: Problem, mask: int, random: object
) -> None:
    problem = masked(problem, mask)
    found = schedule(problem, EXACT)
    assert schedule(problem, EXACT) == found
    turned = replace(problem, times=problem.times[:, ::-1], speeds=problem.speeds[::-1], windows=problem.windows[::-1])
    assert schedule(turned, EXACT).makespan == pytest.approx(found.makespan, rel=1e-6)


def test_windows_are_kept_also_where_lpt_finds_nothing() -> None:
    """3 and 3 at one site, 2, 2 and 2 at the other."""
    problem = replace(Problem.uniform([3.0, 3.0, 2.0, 2.0, 2.0], [1.0, 1.0]), windows=np.array([6.0, 6.0]))
    assert longest_first(problem) is None
    found = schedule(problem, EXACT)
    assert is_valid(problem, found.places)
    assert found.makespan == pytest.approx(6.0)


def test_what_fits_nowhere_is_named() -> None:
    problem = Problem.uniform([3.0, 1.0], [1.0, 1.0])
    with pytest.raises(NoPlaceError) as one:
        schedule(replace(problem, windows=np.array([2.0, 2.0])), EXACT)
    assert one.value.jobs == (0,)
    with pytest.raises(NoPlaceError) as all_of_them:
        schedule(replace(Problem.uniform([2.0, 2.0, 2.0], [1.0]), windows=np.array([5.0])), EXACT)
    assert all_of_them.value.jobs == ()


def test_of_schedules_that_end_together_experts_are_early() -> None:
    """The job at the slow site moves to the fast one, where it is done sooner and still in time."""
    problem = Problem.uniform([9.0, 1.0], [1.0, 10.0]).restricted(np.array([[True, False], [True, True]]))
    found = schedule(problem, EXACT)
    assert found.places == (0, 1)


def test_64_experts_on_16_sites() -> None:
    """The gap is known, whatever the solver's time was enough for."""
    random = np.random.default_rng(7)
    work = random.choice([job("S", 300), job("M", 400), job("L", 500)], 64).tolist()
    problem = Problem.uniform(work, (random.uniform(20, 120, 16) * 1e12).tolist())
    found = schedule(problem, Limits(1.0, 0.01))
    assert is_valid(problem, found.places)
    assert 0 <= found.gap < 0.05


def test_lpt_is_as_good_as_the_spec_says() -> None:
    """LPT / optimum: 1.035 in the mean there."""
    random, ratios = np.random.default_rng(3), []
    for _ in range(20):
        sites, jobs = random.integers(2, 5), random.integers(3, 10)
        problem = Problem.uniform(random.uniform(1, 3, jobs).tolist(), random.uniform(1, 3, sites).tolist())
        quick = longest_first(problem)
        assert quick is not None
        ratios.append(makespan(problem, quick) / schedule(problem, EXACT).makespan)
    assert 1.0 <= np.mean(ratios) < 1.06
    assert max(ratios) < 1.577


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


TO_THE_END = Limits(30.0, 0.0)


def test_jobs_of_a_kind_are_counted_and_all_are_placed() -> None:
    problem = uniform(*[job("M", 400)] * 9)
    found = solved(problem, 19034.0, 40000.0, TO_THE_END)
    assert found.places is not None
    assert sorted(found.places) == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert round(makespan(problem, found.places)) == 21148 == round(found.bound)


def test_a_problem_without_a_schedule_has_none() -> None:
    problem = replace(Problem.uniform([2.0, 2.0, 2.0], [1.0, 1.0]), windows=np.array([3.0, 3.0]))
    found = solved(problem, 3.0, 100.0, TO_THE_END)
    assert found.places is None
    assert found.bound == np.inf


def test_nothing_better_than_what_is_known_is_no_schedule() -> None:
    """The best takes 4; asked for 3 at most."""
    found = solved(Problem.uniform([2.0, 2.0, 2.0], [1.0, 1.0]), 3.0, 3.5, TO_THE_END)
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
        found = solved(problem, 6.0 * unit, 9.0 * unit, TO_THE_END)
        assert found.places is not None
        assert makespan(problem, found.places) == pytest.approx(6.0 * unit)
