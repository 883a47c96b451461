from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator.experts.cases import SITES, SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.experts.exact import Limits
from pier_coordinator.experts.jobs import Job
from pier_coordinator.experts.replan import Remainder, outdated, replanned
from pier_coordinator.experts.scheduling import NoPlaceError
from pier_coordinator.experts.task import Site

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
