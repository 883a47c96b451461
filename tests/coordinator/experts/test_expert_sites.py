"""The sites of a plan: those it was made with, and those that have come since."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.cases import ALICE, CAROL, NOW, Running
from coordinator.expert_cases import accepted_job, accepted_plan
from coordinator.experts.test_execution import two_sites

from pier_coordinator.experts.expert_sites import ExpertSites, Paces
from pier_coordinator.experts.task import Site
from pier_coordinator.runs.registry import LEASE_SECONDS

PLAN = accepted_plan(accepted_job(0, "lab-0"), sites=("lab-0",))


def expert_sites(run: Running) -> ExpertSites:
    return ExpertSites(run.coordinator, PLAN, NOW)


async def test_who_was_there_and_not_planned_with_is_left_out_and_who_comes_is_not(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        made = expert_sites(run)
        assert made.names() == {"lab-0": ALICE.node}
        assert made.outdated() == ""
        run.wall.now += 1
        await run.let_in(CAROL, first=2)
        assert made.names() == {"lab-0": ALICE.node, "lab-2": CAROL.node}
        assert [site.name for site in made.here()] == ["lab-0"]
        async with run.site(CAROL) as carol:
            await carol.register(CAROL)
        assert made.outdated() == "lab-2 has come"
        assert [site.speed for site in made.here()] == [1e8, 1e8], "as fast as the slowest"
        made.planned_with(made.here())
        assert made.outdated() == ""


async def test_a_site_is_lost_once_and_may_come_back(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        made = expert_sites(run)
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
            run.clock.now += LEASE_SECONDS + 1
            await run.coordinator.expire()
            assert made.look(1000.0, [ALICE.node]) == set()
            assert made.look(1059.0, [ALICE.node]) == set()
            assert made.look(1060.0, [ALICE.node]) == {ALICE.node}
            made.planned_with(made.here())
            assert made.look(1061.0, []) == set()
            assert made.lost == {ALICE.node}
            assert made.outdated() == ""
            await alice.beat(ALICE, lease)
        assert made.look(1062.0, []) == set()
        assert made.lost == set()
        assert made.outdated() == "lab-0 has come"


async def test_setup_and_judging_are_in_the_time_of_a_job(tmp_path: Path) -> None:
    own = accepted_job(0, "lab-0").model_copy(update={"setup": 8.0, "judging": 2e8})
    async with two_sites(tmp_path) as run:
        made = ExpertSites(run.coordinator, accepted_plan(own, sites=("lab-0",)), NOW)
        assert made.seconds(own, "lab-0") == pytest.approx(10.0 + 2.0 + 8.0)


async def test_a_site_is_as_fast_as_it_says(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        made = expert_sites(run)
        for step, seconds in ((0, 0.0), (20, 10.0)):
            made.paces.heard(ALICE.node, 0, step, seconds, 1e7)
        run.wall.now += 1
        await run.let_in(CAROL, first=2)
        async with run.site(CAROL) as carol:
            await carol.register(CAROL)
        assert [site.speed for site in made.here()] == [2e7, pytest.approx(2e7)], "as much off the plan as the others"
        made.planned_with([Site("lab-0", 1e8), *made.here()[1:]])
        assert made.outdated() == "lab-0 trains 0.20 times as fast as planned"
        assert made.seconds(PLAN.jobs[0], "lab-0") == pytest.approx(10.0)
        made.planned_with(made.here())
        assert made.outdated() == ""
        assert made.seconds(PLAN.jobs[0], "lab-0") == pytest.approx(50.0)


FLOPS = 1e6


def test_a_speed_is_that_of_the_last_stretch() -> None:
    paces = Paces()
    paces.heard("a", 0, 10, 30.0, FLOPS)
    assert paces.speed("a") is None, "the seconds before the first step are those of starting"
    paces.heard("a", 0, 20, 45.0, FLOPS)
    assert paces.speed("a") is None, "ten steps are too few"
    paces.heard("a", 0, 30, 50.0, FLOPS)
    assert paces.speed("a") == pytest.approx(FLOPS)
    paces.heard("a", 0, 70, 55.0, FLOPS)
    assert paces.speed("a") == pytest.approx(FLOPS), "five seconds are too short"
    paces.heard("a", 0, 110, 60.0, FLOPS)
    assert paces.speed("a") == pytest.approx(8 * FLOPS)
    assert paces.speed("b") is None


@pytest.mark.parametrize(("job", "step", "seconds"), [(1, 60, 60.0), (0, 20, 60.0), (0, 60, 20.0)])
def test_another_expert_or_another_start_begins_a_new_stretch(job: int, step: int, seconds: float) -> None:
    paces = Paces()
    paces.heard("a", 0, 30, 30.0, FLOPS)
    paces.heard("a", job, step, seconds, FLOPS)
    assert paces.speed("a") is None
    paces.heard("a", job, step + 20, seconds + 10.0, FLOPS)
    assert paces.speed("a") == pytest.approx(2 * FLOPS)
