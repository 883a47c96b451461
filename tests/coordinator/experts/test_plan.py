"""The whole way: jobs, their schedule, slack, horizons; and that what does not fit is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coordinator.experts.cases import FLOPS, SITES, SIZES, STEP, TERA, curves, difficulty, is_valid, task
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.allocation import BudgetError
from pier_coordinator.experts.plan import Plan, UnplacedError, compared, planned, steps_until, stretched
from pier_coordinator.experts.recipe import MODES, Mode, Recipe, fitting, jobs, problem
from pier_coordinator.experts.scheduling import Limits, loads
from pier_coordinator.experts.task import Domain, Site

EXACT = Limits(20.0, 0.0)


def all_medium(count: int, steps: int = 400) -> Recipe:
    return Recipe(np.full(count, 1), np.full(count, steps), np.arange(count))


def test_a_job_takes_its_flops_and_its_bytes() -> None:
    made = jobs(task(1), all_medium(1))[0]
    assert made.flops == FLOPS["M"] * 400 * STEP
    assert made.seconds(Site("a", 30 * TERA)) == pytest.approx(made.flops / 3e13)
    slow = Site("b", 30 * TERA, line=1.25e7)
    assert made.seconds(slow) - made.seconds(SITES[0]) == pytest.approx(96), "seed and expert, 48 s each at 100 Mbit/s"


def test_every_domain_of_a_job_has_to_be_set_up() -> None:
    asked = task(2, setup=8.0)
    alone, both = jobs(asked, all_medium(2))[0], jobs(asked, replace(all_medium(2), rows=np.array([0, 0])))[0]
    assert alone.seconds(SITES[2]) == pytest.approx(alone.flops / 9e13 + 8)
    assert both.seconds(SITES[2]) == pytest.approx(both.flops / 9e13 + 16)


def test_setup_leaves_less_for_training_until_a_horizon() -> None:
    known = difficulty(task(9), curves(9))
    plan = planned("auto", task(9, horizon=20_000.0, setup=200.0), known, SITES, EXACT)
    assert plan.schedule.makespan == pytest.approx(20_000, rel=0.01)
    assert plan.is_equal


def test_judging_takes_time_and_no_budget() -> None:
    """A forward pass is a third of a step, and there are two: the expert's and its parent's."""
    asked = task(3)
    judged = replace(asked, domains=tuple(replace(domain, judged=3e6) for domain in asked.domains))
    lean, full = (jobs(each, all_medium(3))[0] for each in (asked, judged))
    assert full.flops == lean.flops
    assert full.seconds(SITES[0]) - lean.seconds(SITES[0]) == pytest.approx(2e6 * FLOPS["M"] / 3e13)


@pytest.mark.parametrize("mode", MODES)
def test_setup_is_in_the_time_of_a_plan_and_in_its_bound(mode: Mode) -> None:
    """An hour each for nine experts at three sites: at least three hours of somebody's time."""
    known = difficulty(task(9), curves(9))
    lean, full = (planned(mode, task(9, setup=setup), known, SITES, EXACT) for setup in (0.0, 3600.0))
    assert full.flops == lean.flops
    assert full.schedule.makespan >= lean.schedule.makespan
    assert full.loads.sum() >= 9 * 3600 + lean.flops / 9e13
    assert lean.schedule.bound + 3600 < full.schedule.bound <= full.schedule.makespan


def test_memory_and_residency_say_where_a_job_may_be() -> None:
    asked = task(2)
    asked = replace(asked, domains=(asked.domains[0], Domain("private", 1.0, 1e12, sites=frozenset({"b"}))))
    sites = [Site("a", TERA), Site("b", TERA), Site("c", TERA, memory=4e9)]
    eligible = problem(jobs(asked, all_medium(2)), sites).eligible
    assert eligible.tolist() == [[True, True, False], [False, True, False]]


def test_a_chain_may_be_only_where_all_of_its_texts_may() -> None:
    domains = tuple(Domain(name, 1.0, 1e12, sites=frozenset(allowed)) for name, allowed in (("x", "ab"), ("y", "bc")))
    asked = replace(task(2), domains=domains)
    chained = replace(all_medium(2), rows=np.array([0, 0]))
    (both,) = jobs(asked, chained)
    assert (both.name, both.sites) == ("x → y", frozenset("b"))
    nowhere = replace(asked, domains=(domains[0], Domain("z", 1.0, 1e12, sites=frozenset("c"))))
    assert not problem(jobs(nowhere, chained), SITES).eligible.any()


def test_idle_sites_get_extra_steps_until_the_last_one_is_done() -> None:
    asked, law = task(3), curves(3)
    plan = planned("MHo-IHo", asked, difficulty(asked, law), SITES, EXACT)
    assert round(plan.schedule.makespan) == 8459
    assert plan.loads.round().tolist() == [0.0, 6345.0, 8459.0] or plan.idle > 0.2
    (single,) = plan.orders[1]
    assert plan.extra[single] == pytest.approx(400 * (8459 / 6345 - 1), abs=1)
    assert plan.is_equal


def test_a_horizon_leaves_no_site_idle() -> None:
    """Speeds 1:2:3: 200, 400 and 600 steps of M in 6 345 s."""
    asked, law = task(3), curves(3)
    equal = replace(law, data=np.full(3, 200.0))
    steps = steps_until(asked, equal, all_medium(3), (0, 1, 2), SITES, 6344.6, np.full(3, 1))
    assert steps.tolist() == [200, 400, 600]


def test_a_text_that_is_short_is_not_repeated_for_ever() -> None:
    asked = task(1)
    asked = replace(asked, domains=(Domain("short", 1.0, 110 * STEP),))
    steps = steps_until(asked, curves(1), all_medium(1), (2,), SITES, 1e6, np.array([400]))
    assert steps.tolist() == [440]


def test_in_a_mode_of_the_paper_a_horizon_scales_all_steps() -> None:
    made = stretched(task(3), all_medium(3), (2, 2, 1), SITES, 8459 / 2)
    assert made.steps.tolist() == [199, 199, 199]
    assert made.scale == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_plans_for_a_horizon_end_there(mode: Mode) -> None:
    asked = task(9, horizon=20_000.0)
    plan = planned(mode, asked, difficulty(asked, curves(9)), SITES, EXACT)
    assert plan.schedule.makespan <= 20_000 * (1 + 1e-9)
    assert plan.schedule.makespan >= 20_000 * 0.99
    if mode == "auto":
        assert plan.idle < 0.01


@pytest.mark.parametrize("mode", MODES)
def test_a_site_that_leaves_before_the_horizon_is_done_by_then(mode: Mode) -> None:
    asked = task(9, horizon=20_000.0)
    sites = [SITES[0], SITES[1], replace(SITES[2], window=12_000.0)]
    plan = planned(mode, asked, difficulty(asked, curves(9)), sites, EXACT)
    assert plan.loads[2] <= 12_000 * (1 + 1e-9)
    assert is_valid(problem(plan.jobs, sites), plan.schedule.places)


@pytest.mark.parametrize("domains", [3, 8])
def test_every_plan_is_valid(domains: int) -> None:
    asked = task(domains)
    sites = [replace(SITES[0], memory=4.7e9), SITES[1], replace(SITES[2], line=1e8)]
    for plan in compared(asked, difficulty(asked, curves(domains)), sites, EXACT).values():
        assert isinstance(plan, Plan)
        assert is_valid(problem(plan.jobs, sites), plan.schedule.places)
        assert sorted(domain for job in plan.jobs for domain in job.domains) == [*range(domains)]
        assert sorted(job for own in plan.orders for job in own) == [*range(domains)]
        assert plan.schedule.bound <= plan.schedule.makespan
        assert plan.is_equal
        assert (plan.extra >= 0).all()
        assert plan.loads.max() == pytest.approx(plan.schedule.makespan)


def test_chains_stay_at_one_site_and_have_no_auto() -> None:
    asked = task(9, chain=True)
    plans = compared(asked, difficulty(asked, curves(9)), SITES, EXACT)
    assert "auto" not in plans
    for plan in plans.values():
        assert isinstance(plan, Plan)
        assert len(plan.jobs) == 3
        assert not plan.extra.any()


def test_the_size_that_fits_nowhere_is_named_and_auto_does_without_it() -> None:
    asked = task(3)
    sites = [replace(site, memory=5.1e9) for site in SITES]
    plans = compared(asked, difficulty(asked, curves(3)), sites, EXACT)
    failed = plans["MHe-IHo"]
    assert isinstance(failed, UnplacedError)
    assert [job.size.name for job in failed.jobs] == ["L"]
    auto = plans["auto"]
    assert isinstance(auto, Plan)
    assert {job.size.name for job in auto.jobs} <= {"S", "M"}


def test_auto_takes_a_size_that_fits_where_the_text_may_be() -> None:
    """L fits at c only, which may not see the text of d0."""
    asked = task(3)
    asked = replace(asked, domains=(replace(asked.domains[0], sites=frozenset("ab")), *asked.domains[1:]))
    sites = [replace(SITES[0], memory=5.1e9), replace(SITES[1], memory=5.1e9), SITES[2]]
    law = replace(curves(3), size=np.full(3, 5000.0))
    plan = planned("auto", asked, difficulty(asked, law), sites, EXACT)
    assert fitting(asked, sites).tolist() == [[True, True, False], [True] * 3, [True] * 3]
    assert plan.recipe.sizes.tolist() == [1, 2, 2]


def test_a_budget_that_is_too_small_is_told() -> None:
    asked = task(3, budget=1e15)
    with pytest.raises(BudgetError):
        planned("auto", asked, difficulty(asked, curves(3)), SITES, EXACT)


def test_a_domain_that_matters_more_has_more_of_the_loss() -> None:
    asked = replace(task(2), domains=(Domain("x", 3.0, 1e12), Domain("y", 1.0, 1e12)))
    assert asked.weights.tolist() == [1.5, 0.5]
    assert asked.homogeneous == 2 * SIZES[1].flops * 400 * STEP
    assert asked.most.tolist() == [4e12, 4e12]


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
