"""Who is planned in, and when paths are planned again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.config.run import PipelineSection
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.planner import UNKNOWN, Lacking, Planner, build_problem, drawn, drifted, sites_of, with_times
from pier_node.pipeline.planning.plan import Plan as Paths
from pier_node.pipeline.planning.plan import violations
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.vote_state import VoteState
from pier_proto.v1.peer_pb2 import IterationPlan, Place, Pulse, Site

NEW = VoteState(0, 0.0, (0, 0, 0, 0))
LATER = VoteState(5, 3.0, (7 << 24, 7 << 24, 7 << 24, 7 << 24))
FULL_FROM = 20
SIX = dict(zip("abcdef", (0, 0, 1, 1, 2, 3), strict=True))


class Asked:
    """A planner that notes its searches and problems; once the gate is open, they find `better` paths."""

    def __init__(self, **section: Any) -> None:
        self.searches: list[bool] = []
        self.cancelled = 0
        self.better: Callable[[Paths], Paths] = lambda plan: plan
        self.gate = asyncio.Event()
        self.gate.set()
        self.problems: list[tuple[Problem, Paths]] = []
        tables = PipelineSection.model_validate({"stages": 4, "microbatches": 6, **section})
        told = lambda _, problem, plan: self.problems.append((problem, plan))  # noqa: E731
        self.planner = Planner(tables, 1, FULL_FROM, told, self._search)

    async def _search(self, problem: Problem, seed: int, seconds: float, current: Paths, stay: bool) -> Paths:
        self.searches.append(stay)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.better(current)

    def plan(self, voted: VoteState, pulses: dict[str, Pulse], round: int = 8) -> IterationPlan:
        return asyncio.run(self.planner.plan(round, voted, pulses, {}))

    async def plan_of(self, pulses: dict[str, Pulse]) -> IterationPlan:
        return await self.planner.plan(8, LATER, pulses, {})


def pulses(held: dict[str, int], version: int = 7 << 24, **times: float) -> dict[str, Pulse]:
    return {
        node: Pulse(site=Site(node=node), place=Place(stage=stage, version=version, memory=3, **times))  # type: ignore[arg-type]
        for node, stage in held.items()
    }


def test_at_the_start_everybody_gets_a_stage() -> None:
    asked = Asked()
    message = asked.plan(NEW, {node: Pulse(site=Site(node=node)) for node in "abcdef"}, round=1)
    assert [*message.nodes] == [*"abcdef"]
    assert sorted(message.stages) == [0, 0, 1, 1, 2, 3]
    assert asked.searches == [False]
    assert all(len(way) == 7 for way in Plan.read(message, 4).ways)


def test_an_elector_takes_part_in_the_first_plan_even_if_no_path_visits_it() -> None:
    for elector in "abc":
        asked = Asked(stages=2, paths="full", microbatches=2)
        voted = VoteState(0, 0.0, (0, 0), electors=frozenset(elector))
        plan = Plan.read(asked.plan(voted, {node: Pulse(site=Site(node=node)) for node in "abc"}, round=1), 2)
        assert elector in plan.stages
        assert {*plan.stages} | {*plan.message.candidates} == {*"abc"}
        assert [*plan.stages] == sorted(plan.stages)
        assert all(plan.stages[node] == stage for way in plan.ways for node, stage in zip(way, (0, 1)))


def test_at_the_start_too_few_sites_are_waited_for() -> None:
    with pytest.raises(Lacking, match="3 sites are here for 4 stages: start the others"):
        Asked().plan(NEW, {node: Pulse(site=Site(node=node)) for node in "abc"}, round=2)


def test_electors_that_lack_the_last_step_are_waited_for_if_it_takes_them_to_decide() -> None:
    voted, behind = replace(LATER, electors=frozenset("abcdefz")), pulses(SIX)
    for node in "bd":
        behind[node].place.version = 6 << 24
    assert [*Asked().plan(voted, behind).nodes] == [*"acef"]
    behind["a"].place.version, behind["g"] = 6 << 24, pulses({"g": 0})["g"]
    with pytest.raises(
        Lacking, match="most of the sites that took the last step lack it now, and must catch up first: a, b, d"
    ):
        Asked().plan(voted, behind)
    del behind["b"], behind["d"]
    assert [*Asked().plan(voted, behind).nodes] == [*"cefg"], "those that are gone are not"


@pytest.mark.parametrize(("paths", "length"), [("full", 4), ("skip", 3), ("random", 3)])
def test_paths_are_as_the_policy_says_and_allowed(paths: str, length: int) -> None:
    asked = Asked(paths=paths)
    message = asked.plan(LATER, pulses(SIX))
    assert dict(zip(message.nodes, message.stages, strict=True)) == SIX
    assert {len(path.sites) for path in message.paths} == {length}
    ((problem, plan),) = asked.problems
    assert violations(problem, plan) == []
    assert asked.searches == ([] if paths == "random" else [True])


@pytest.mark.parametrize("paths", ["skip", "random"])
def test_at_the_end_microbatches_visit_all_stages_that_have_sites(paths: str) -> None:
    asked = Asked(paths=paths)
    for step, length in ((FULL_FROM - 1, 3), (FULL_FROM, 4), (FULL_FROM + 1, 4)):
        message = asked.plan(replace(LATER, steps=step), pulses(SIX))
        assert {len(path.sites) for path in message.paths} == {length}
        assert violations(*asked.problems[-1]) == []
    without_last = {node: it for node, it in pulses(SIX).items() if node != "f"}
    assert {len(path.sites) for path in asked.plan(replace(LATER, steps=FULL_FROM), without_last).paths} == {3}


async def test_a_plan_stays_until_sites_or_their_pace_change() -> None:
    asked = Asked()
    first = await asked.plan_of(pulses(SIX, forward=1.0, backward=2.0))
    same = await asked.plan_of(pulses(SIX, forward=1.1, backward=2.0))
    assert same.paths == first.paths
    assert asked.searches == [True]
    await asked.plan_of({node: it for node, it in pulses(SIX, forward=1.1, backward=2.0).items() if node != "c"})
    assert asked.searches == [True, True]
    assert {site.name for site in asked.problems[-1][0].sites} == set("abdef")


async def test_iterations_go_on_while_paths_for_another_pace_are_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier_node.pipeline.path_search.REST", 0.0)
    asked, slow = Asked(), pulses(SIX, forward=1.0, backward=2.0)
    first = await asked.plan_of(slow)
    slow["e"].place.forward = 5.0
    asked.gate.clear()
    assert (await asked.plan_of(slow)).paths == first.paths
    assert (await asked.plan_of(slow)).paths == first.paths
    asked.better = lambda plan: replace(plan, waves=tuple(wave[::-1] for wave in plan.waves[::-1]))
    asked.gate.set()
    await asked.planner.searching.wait(60.0)
    assert [*(await asked.plan_of(slow)).paths] == [*first.paths][::-1]
    assert asked.searches == [True, True], "one for each pace"


async def test_sites_do_not_wait_long_for_paths_over_others_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier_node.pipeline.planner.PROMPT", -1.9)  # of the 2 s of the search
    asked = Asked()
    asked.gate.clear()
    message = await asked.plan_of(pulses(SIX))
    assert len(message.paths) == 6
    await asked.planner.searching.close()
    assert asked.cancelled == 1


async def test_a_search_is_followed_by_a_rest_unless_sites_come_or_go(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slow = Asked(), pulses(SIX, forward=5.0, backward=2.0)
    monkeypatch.setattr("pier_node.pipeline.path_search.REST", 1e12)
    await asked.plan_of(pulses(SIX, forward=1.0, backward=2.0))
    await asked.plan_of(slow)
    assert len(asked.searches) == 1
    assert asked.problems[-1][0].sites[0].forward_s == 5.0
    await asked.plan_of({node: it for node, it in slow.items() if node != "c"})
    assert len(asked.searches) == 2


def test_random_paths_are_others_in_each_step_and_the_same_when_one_is_tried_again() -> None:
    asked = Asked(paths="random")

    def routes(step: int, round: int) -> list[list[int]]:
        message = asked.plan(replace(LATER, steps=step), pulses(SIX), round)
        return [[*path.sites] for path in message.paths]

    assert len({str(routes(step, 8)) for step in (5, 6, 7)}) == 3
    assert routes(5, 8) == routes(5, 9), "a dropped attempt would see other gradients"


def test_random_paths_without_skips_load_all_replicas_equally() -> None:
    """As in NoLoCo (arXiv 2506.10911), from the first attempt on."""
    held = dict(zip("abcdef", (0, 0, 1, 1, 2, 2), strict=True))
    there = {"stages": 3, "paths": "random", "skip": 0.0}
    voted = VoteState(5, 3.0, (7 << 24,) * 3)
    new = {node: Pulse(site=Site(node=node)) for node in "abcdef"}
    for message in (
        Asked(**there).plan(voted, pulses(held)),
        Asked(**there).plan(VoteState(0, 0.0, (0, 0, 0)), new, round=1),
    ):
        visits = Counter(site for path in message.paths for site in path.sites)
        assert [*visits.values()] == [3] * 6, "6 microbatches, 2 replicas a stage"


def test_random_paths_come_in_as_many_waves_as_memory_needs() -> None:
    """The one site of the last stage cannot hold all that comes to it at once."""
    asked = Asked(paths="random")
    held = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 2}
    message = asked.plan(LATER, pulses(held))
    first = 0
    for size in message.waves:
        visits = Counter(site for path in message.paths[first : first + size] for site in path.sites)
        assert max(visits.values()) <= 3
        first += size
    assert len(message.waves) > 1


def test_a_lost_stage_is_skipped_where_paths_are_short_enough() -> None:
    five = pulses({node: stage for node, stage in SIX.items() if stage != 2})
    message = Asked().plan(LATER, five)
    assert {stage for way in Plan.read(message, 4).ways for stage in (SIX[node] for node in way)} == {0, 1, 3}
    with pytest.raises(Lacking, match="stages 2 have no site"):
        Asked(paths="full").plan(LATER, five)


def test_an_outer_round_has_all_sites_that_are_well_and_no_paths() -> None:
    there = pulses({node: stage for node, stage in SIX.items() if stage != 2})
    there["d"].place.version = 6 << 24
    asked = Asked(paths="full")
    message = asyncio.run(asked.planner.plan(8, LATER, there, {}, meet=True))
    assert dict(zip(message.nodes, message.stages, strict=True)) == {"a": 0, "b": 0, "c": 1, "f": 3}
    assert (len(message.paths), message.meet, asked.searches) == (0, True, [])
    assert Plan.read(message, 4).replicas(0) == ["a", "b"]


def test_who_has_an_older_version_takes_no_part_and_who_has_no_stage_gets_one() -> None:
    there = pulses(SIX)
    there["d"].place.version = 6 << 24
    there["g"] = Pulse(site=Site(node="g"))
    message = Asked().plan(LATER, there)
    assert "d" not in message.nodes
    assert ([*message.candidates], [*message.newcomers]) == (["g"], [1])
    there["e"].place.version = 6 << 24
    with pytest.raises(Lacking, match="e, which must catch up first"):
        Asked(paths="full").plan(LATER, there)


def test_who_is_wanted_for_a_stage_gets_it_and_the_others_fill_up() -> None:
    asked = Asked()
    new = {node: Pulse(site=Site(node=node)) for node in "abcdef"}
    new["a"].wanted_stage, new["e"].wanted_stage, new["f"].wanted_stage = 3, 0, 9  # there is no stage 9
    message = asked.plan(NEW, new, round=1)
    held = dict(zip(message.nodes, message.stages, strict=True))
    assert (held["a"], held["e"]) == (3, 0)
    assert sorted(held.values()) == [0, 0, 1, 1, 2, 3]
    assert asked.searches == [True], "over these stages"
    there = pulses(SIX) | {"g": Pulse(site=Site(node="g"), wanted_stage=2)}
    message = Asked().plan(LATER, there)
    assert ([*message.candidates], [*message.newcomers]) == (["g"], [2])


def test_a_newcomer_is_a_replica_where_there_is_none_and_then_helps_the_slowest_stage() -> None:
    there = pulses({"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2, "g": 3}, forward=0.1, backward=0.2)
    for node, times in {"c": 2.0, "d": 2.0, "g": 0.5}.items():
        there[node].place.forward *= times
        there[node].place.backward *= times
    for node in "xyz":
        there[node] = Pulse(site=Site(node=node))
    message = Asked().plan(LATER, there)
    # Stage 3 has one site, although a fast one. Then stage 1 is slowest: two thirds of all paths visit a later stage.
    assert ([*message.candidates], [*message.newcomers]) == (["x", "y", "z"], [3, 1, 0])


def test_little_memory_takes_more_waves() -> None:
    lean = pulses(SIX)
    for it in lean.values():
        it.place.memory = 1
    message = Asked().plan(LATER, lean)
    assert len(message.waves) > 2


LENGTHS = [(0.25, 4, 3), (1 / 3, 6, 4), (0.25, 8, 6), (0.5, 4, 2), (0.9, 4, 2)]


@pytest.mark.parametrize(("skip", "stages", "length"), LENGTHS)
def test_the_length_of_paths_is_that_of_the_paper(skip: float, stages: int, length: int) -> None:
    assert PipelineSection(stages=stages, skip=skip).path_length == length


SIX_SITES = {node: Place(forward=1.0, backward=2.0, loss=0.5, memory=3, transfer={"a": 0.25}) for node in "abcdef"}


def section(**keys: object) -> PipelineSection:
    return PipelineSection.model_validate({"stages": 4, "microbatches": 6, **keys})


def test_it_is_that_of_the_run_with_what_its_sites_measured() -> None:
    """SkipPipe (arXiv 2502.19913): n_0 : n = 3 : 2 for paths of 3 of 4 stages, as near as six sites come."""
    problem, plan = build_problem(section(), SIX_SITES, {}, seed=1)
    assert (problem.stage_sizes, problem.path_length, problem.microbatches) == ((2, 2, 1, 1), 3, 6)
    assert [site.name for site in problem.sites] == [*"abcdef"]
    assert {(it.forward_s, it.backward_s, it.loss_s, it.memory) for it in problem.sites} == {(1.0, 2.0, 0.5, 3)}
    assert {problem.transfer_s[a][b] for a in range(6) for b in range(6) if a != b} == {0.25}
    assert problem.rules.max_jump == 3
    assert violations(problem, plan) == []


@pytest.mark.parametrize("paths", ["skip", "random"])
def test_no_path_jumps_further_than_the_run_allows(paths: str) -> None:
    """SkipPipe's reference allows 3 or 4; with half of eight stages left out there would be jumps of up to 5."""
    longest = {}
    for most in (0, 3):
        asked = Asked(stages=8, skip=0.5, paths=paths, max_jump=most)
        voted = VoteState(5, 3.0, (7 << 24,) * 8)
        message = asked.plan(voted, pulses({f"s{stage}": stage for stage in range(8)}))
        ways = [[message.stages[site] for site in path.sites] for path in message.paths]
        longest[most] = max(after - before for way in ways for before, after in pairwise(way))
        assert violations(*asked.problems[-1]) == []
    assert longest[0] > 3 >= longest[3]


def test_sites_may_keep_their_stages() -> None:
    stages = ((0, 1), (2, 5), (3,), (4,))
    problem, plan = drawn(section(), (2, 2, 1, 1), SIX_SITES, {}, stages, seed=1)
    assert plan.stages == stages
    assert violations(problem, plan) == []


def test_too_few_sites_are_refused_and_little_memory_takes_more_waves() -> None:
    with pytest.raises(PierError, match="3 sites cannot hold 4 stages"):
        build_problem(section(), {node: SIX_SITES[node] for node in "abc"}, {}, seed=1)
    assert build_problem(section(), SIX_SITES, {}, seed=1)[0].waves == 2
    lean = {node: Place(memory=1) for node in "abcdef"}
    assert build_problem(section(), lean, {}, seed=1)[0].waves == 3


@settings(max_examples=25, deadline=None)
@given(
    sites=st.integers(2, 9),
    stages=st.integers(2, 6),
    skip=st.sampled_from([0.0, 0.25, 0.5]),
    microbatches=st.integers(1, 9),
    memory=st.integers(1, 4),
)
def test_whatever_is_posed_has_a_plan_that_is_allowed(
    sites: int, stages: int, skip: float, microbatches: int, memory: int
) -> None:
    asked = section(stages=stages, skip=skip, microbatches=microbatches, memory=memory)
    places = {f"s{at}": Place(forward=1.0 + at, backward=2.0, memory=memory) for at in range(sites)}
    if sites < stages:
        with pytest.raises(PierError):
            build_problem(asked, places, {}, seed=3)
        return
    assert violations(*build_problem(asked, places, {}, seed=3)) == []


def place(transfer: dict[str, float], forward: float = 1.0) -> Place:
    return Place(forward=forward, backward=2.0, loss=0.5, memory=3, transfer=transfer)


A, B, C = place({"b": 0.4, "c": 0.6}), place({"a": 0.2}), Place(memory=2)
APART = ((0.0,) * 3,) * 3


def problem(a: Place = A, b: Place = B, c: Place = C) -> Problem:
    places = {"a": a, "b": b, "c": c}
    return with_times(Problem(sites_of(places), APART, (1, 2), 2, 2), places, {"b": 0.1})


def test_what_was_measured_counts_and_the_rest_is_as_at_its_like() -> None:
    found = problem()
    assert found.transfer_s[:2] == ((0.0, 0.4, 0.6), (0.2, 0.0, 0.2))
    assert found.transfer_s[2] == pytest.approx((0.35, 0.35, 0.0))
    assert found.uplink_s == pytest.approx((0.5, 0.2, 0.35))
    assert [(it.forward_s, it.backward_s, it.loss_s, it.memory) for it in found.sites[1:]] == [
        (1.0, 2.0, 0.5, 3),
        (1.0, 2.0, 0.5, 2),
    ]


def test_before_anything_was_sent_half_of_the_round_trips_must_do() -> None:
    places = dict.fromkeys("abc", Place(memory=1))
    found = with_times(Problem(sites_of(places), APART, (1, 2), 2, 2), places, {"b": 0.1, "c": 0.3})
    assert found.transfer_s[1][2] == pytest.approx(0.1)
    assert found.transfer_s[0][1] == pytest.approx(0.05)
    assert found.uplink_s == ()
    assert {it.forward_s for it in found.sites} == {UNKNOWN.forward}


def test_a_slower_site_or_line_is_a_reason_to_plan_anew() -> None:
    slow = place({"a": 0.2}, forward=5.0)
    assert drifted(problem(), problem(b=slow))
    assert drifted(problem(b=slow), problem())
    assert drifted(problem(), problem(b=place({"a": 1.0})))
    assert not drifted(problem(), problem(b=place({"a": 0.25})))


def test_what_is_small_beside_a_visit_is_none() -> None:
    assert not drifted(problem(), problem(b=place({"a": 0.4}))), "0.2 s of some 4 s"
    quick = replace(problem(), uplink_s=())
    assert not drifted(quick, quick)
