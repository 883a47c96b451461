"""What is left of a plan, and where it continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.cases import ALICE, BOB, CAROL, NOW, Running
from coordinator.expert_cases import DONE, accepted_job, accepted_plan
from coordinator.experts.cases import SITES, SIZES
from coordinator.experts.test_execution import two_sites
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.recipe import Job
from pier_coordinator.experts.replan import ExpertSites, OpenWork, Paces, Remainder, outdated, replanned
from pier_coordinator.experts.scheduling import Limits, NoPlaceError
from pier_coordinator.experts.task import Site
from pier_coordinator.runs.sites import LEASE_SECONDS
from pier_coordinator.store.experts import Expert

EXACT = Limits(20.0, 0.0)
EQUAL = [Site("a", 1.0), Site("b", 1.0)]


def rest(left: float, site: str = "", replay: float = 0.0) -> Remainder:
    """Of an expert of size S."""
    job = Job("expert", (0,), SIZES[0], left, 0.0, 2 * SIZES[0].stored, 0.0, frozenset())
    return Remainder(job, left, replay, site, begun=bool(site), kept=bool(site))


def test_a_speed_that_is_off_by_more_than_a_tenth_asks_for_a_new_plan() -> None:
    planned = {"a": 1.0, "b": 2.0}
    assert outdated(planned, {"a": 1.09, "b": 1.85}) == ""
    assert outdated(planned, {"a": 1.11, "b": 2.0}) == "a trains 1.11 times as fast as planned"
    assert outdated(planned, {"a": 1.0, "b": 1.75}) == "b trains 0.88 times as fast as planned"
    assert outdated(planned, {"a": 1.0}) == "b is lost"
    assert outdated(planned, {"a": 1.0, "b": 2.0, "c": 1.0}) == "c has come"


def test_an_expert_moves_only_if_all_are_done_sooner_in_spite_of_its_replay() -> None:
    """Both at a, b idles: 12 there, or 6 and what is done again."""
    assert replanned([rest(6, "a", 5), rest(6, "a", 5)], EQUAL, EXACT).places in ((0, 1), (1, 0))
    assert replanned([rest(6, "a", 6.5), rest(6, "a", 6.5)], EQUAL, EXACT).places == (0, 0)


def test_its_checkpoint_takes_time_on_the_line() -> None:
    slow = [replace(site, line=1.0) for site in EQUAL]
    assert replanned([rest(6, "a"), rest(6, "a")], slow, EXACT).places == (0, 0)
    found = replanned([rest(6, "a")], [Site("a", 1.0, line=1e8)], EXACT)
    assert found.makespan == pytest.approx(6 + 6), "600 MB are sent; nothing is fetched"
    elsewhere = replanned([rest(6, "lost")], [Site("a", 1.0, line=1e8)], EXACT)
    assert elsewhere.makespan == pytest.approx(6 + 12 * 0.9203 + 6), "the checkpoint of 92.03 M parameters is fetched"
    none = replanned([replace(rest(6, "lost"), kept=False)], [Site("a", 1.0, line=1e8)], EXACT)
    assert none.makespan == pytest.approx(6 + 6 + 6), "there is none: the seed is fetched"
    waits = replanned([replace(rest(6, "a"), begun=False)], [Site("a", 1.0, line=1e8)], EXACT)
    assert waits.makespan == pytest.approx(6 + 12 * 0.9203 + 6), "its site has yet to fetch it"


def test_an_expert_is_set_up_again_where_it_goes_and_not_where_it_is() -> None:
    def set_up(one: Remainder) -> Remainder:
        return replace(one, job=replace(one.job, setup=3.0))

    assert replanned([set_up(rest(6, "a"))], EQUAL[:1], EXACT).makespan == pytest.approx(6)
    assert replanned([set_up(rest(6))], EQUAL[:1], EXACT).makespan == pytest.approx(9)
    assert replanned([set_up(rest(6, "a")), set_up(rest(5, "a"))], EQUAL, EXACT).makespan == pytest.approx(8)
    assert replanned([set_up(rest(2, "a")), set_up(rest(2, "a"))], EQUAL, EXACT).places == (0, 0), "5 elsewhere"


def test_what_has_not_begun_goes_where_it_is_done_first() -> None:
    found = replanned([rest(6, "a", 5), rest(5), rest(1)], EQUAL, EXACT)
    assert found.places == (0, 1, 1)


def test_what_has_not_begun_stays_where_it_is_unless_it_pays_to_move() -> None:
    waiting = [replace(rest(6, "a"), begun=False), replace(rest(6, "a"), begun=False)]
    assert sorted(replanned(waiting, EQUAL, EXACT).places) == [0, 1]
    near = [replace(rest(flops, site), begun=False) for flops, site in ((50, "a"), (52, "a"), (102, "b"), (5, "b"))]
    assert replanned(near, EQUAL, Limits(20.0, 0.05)).places == (0, 0, 1, 1), "it would be done 2 % sooner"


def test_an_idle_site_takes_what_waits_although_the_longest_ends_no_sooner() -> None:
    work = [rest(100, "a", 1), rest(10, "b", 1), replace(rest(9, "b"), begun=False)]
    three = [*EQUAL, Site("c", 1.0)]
    assert replanned(work, three, EXACT).places == (0, 1, 2)


def test_a_site_that_must_leave_gives_its_expert_away() -> None:
    leaving = [replace(EQUAL[0], window=3.0), EQUAL[1]]
    assert replanned([rest(6, "a", 1)], leaving, EXACT).places == (1,)
    with pytest.raises(NoPlaceError):
        replanned([rest(6, "a", 1)], leaving[:1], EXACT)


@given(
    st.lists(st.tuples(st.floats(1, 20), st.sampled_from(["a", "b", "c", ""])), min_size=1, max_size=9),
    st.sampled_from(["a", "b", "c"]),
)
@settings(max_examples=15, deadline=None)
def test_after_a_loss_all_are_done_within_the_bound_and_one_expert_more(
    left: list[tuple[float, str]], lost: str
) -> None:
    """Property 11, where nothing has to be done again or sent."""
    work = [replace(rest(flops * 1e15, site), replay=0.0) for flops, site in left]
    sites = [site for site in SITES if site.name != lost]
    speeds = [site.speed for site in sites]
    found = replanned([replace(one, site=one.site.replace(lost, "")) for one in work], sites, EXACT)
    bound = sum(one.left for one in work) / sum(speeds)
    longest = max(one.left for one in work) / min(speeds)
    stuck = max(sum(one.left for one in work if one.site == site.name) / site.speed for site in sites)
    assert found.makespan <= max(bound + longest, stuck) * (1 + 1e-6)
    assert found.bound <= found.makespan


NAMES = {"a": "lab-0", "b": "lab-1"}
THREE = [Site("lab-0", 1e8), Site("lab-1", 1e8), Site("lab-2", 1e8)]
PLAN = accepted_plan(
    accepted_job(0, "lab-0", flops=3e9),
    accepted_job(1, "lab-0"),
    accepted_job(2, "lab-1"),
    accepted_job(3, "lab-1", after=2),
)


def job(number: int, node: str, result: dict[str, Any] | None = None, declined: tuple[str, ...] = ()) -> Expert:
    return PLAN.jobs[number].model_copy(update={"node": node, "result": result, "declined": declined})


def work(*jobs: Expert, kept: dict[int, int] | None = None, **steps: int) -> OpenWork:
    plan = PLAN.updated(job(number, "a" if number < 2 else "b") for number in range(4)).updated(jobs)
    in_training = [plan.jobs[int(key[1:])].progressed(step, None) for key, step in steps.items()]
    return OpenWork(plan.updated(in_training), kept or {}, NAMES)


def test_what_is_done_is_not_open_and_the_shortest_come_first() -> None:
    assert work().chains() == [[1], [2, 3], [0]]
    assert work(job(1, "a", DONE), job(2, "b", DONE)).chains() == [[2, 3], [0]]
    assert work(job(2, "b", DONE), job(3, "b", DONE)).chains() == [[1], [0]]


def test_what_a_site_does_next_is_begun_and_so_is_what_has_steps() -> None:
    assert [work().is_begun(chain) for chain in ([0], [1], [2, 3])] == [False, True, True]
    assert work(_0=5).is_begun([0])
    assert not work(_0=5, kept={0: 5}).is_begun([0]), "another site has trained these"


def test_of_a_chain_what_is_done_stays_done_where_it_is() -> None:
    rest = work(job(2, "b", DONE), _3=40).remainder([2, 3], False, THREE)
    assert [rest.left, rest.replay] == pytest.approx([0.6e9, 1.4e9]), "how it is set up elsewhere the job says"
    assert (rest.site, rest.begun, rest.kept) == ("lab-1", True, False)
    again = work(job(2, "b", DONE), _3=40).remainder([2, 3], True, THREE)
    assert (again.left, again.replay, again.site, again.begun, again.kept) == (2e9, 0.0, "", False, False)
    kept = work(job(2, "b", DONE), _3=40, kept={2: 100, 3: 30}).remainder([2, 3], True, THREE)
    assert kept.left == pytest.approx(0.7e9)
    assert kept.kept


def test_elsewhere_only_what_came_after_the_checkpoint_is_done_again() -> None:
    found = work(kept={0: 30}, _0=40)
    rest = found.remainder([0], False, THREE)
    assert [rest.left, rest.replay] == pytest.approx([1.8e9, 0.3e9])
    lost = found.remainder([0], True, THREE)
    assert [lost.left, lost.replay] == pytest.approx([2.1e9, 0.0])
    assert (rest.kept, lost.kept) == (True, True)
    ahead = work(kept={0: 30}, _0=10).remainder([0], False, THREE)
    assert [ahead.left, ahead.replay] == pytest.approx([2.7e9, 0.0]), "its site could not use it"


def test_a_site_that_has_declined_is_not_asked_again() -> None:
    rest = work(job(1, "", None, ("a",))).remainder([1], True, THREE)
    assert [rest.job.fits(site) for site in THREE] == [False, True, True]
    nobody = work(job(1, "", None, ("a", "b"))).remainder([1], True, THREE[:2])
    assert not any(nobody.job.fits(site) for site in THREE)


OF_ONE = accepted_plan(accepted_job(0, "lab-0"), sites=("lab-0",))


def expert_sites(run: Running) -> ExpertSites:
    return ExpertSites(run.coordinator, OF_ONE.of_sites({"lab-0": ALICE.node}), NOW)


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


async def test_a_site_stays_in_the_plan_under_another_name_and_nobody_takes_its_place(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as run:
        made = expert_sites(run)
        async with run.site(ALICE) as alice:
            await alice.register(ALICE, name="attic")
        assert made.names() == {"lab-0": ALICE.node}
        assert [site.name for site in made.here()] == ["lab-0"]
        assert made.outdated() == ""
        run.wall.now += 1
        await run.let_in(CAROL, first=0)
        assert made.names() == {"lab-0": ALICE.node, CAROL.node: CAROL.node}
        assert made.labels() == {ALICE.node: "lab-0", BOB.node: "lab-1", CAROL.node: CAROL.node}


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
        made = ExpertSites(run.coordinator, accepted_plan(own, sites=("lab-0",)).of_sites({"lab-0": ALICE.node}), NOW)
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
        assert made.seconds(OF_ONE.jobs[0], "lab-0") == pytest.approx(10.0)
        made.planned_with(made.here())
        assert made.outdated() == ""
        assert made.seconds(OF_ONE.jobs[0], "lab-0") == pytest.approx(50.0)


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
