"""Each constraint of SkipPipe (arXiv 2502.19913), broken alone; first plans; and random routing.

Routing: equal load, all pairs, the same for everybody (NoLoCo, arXiv 2506.10911).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.planning.cases import SOME, problem, problems, site

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.plan import (
    Path,
    Plan,
    plan_from_dict,
    plan_to_dict,
    random_plan,
    random_routes,
    stage_loads,
    violations,
)
from pier_node.pipeline.planning.problem import Problem, Rules, problem_from_json, problem_to_json

STAGES = ((0, 1), (2, 3), (4, 5))
WAVE: tuple[Path, ...] = ((0, 2), (0, 4), (1, 3), (1, 5))
GOOD = Plan(STAGES, (WAVE, WAVE))
IT = problem(stage_sizes=(2, 2, 2), microbatches=8)
LONG = problem(stage_sizes=(2, 2, 2), path_length=3, microbatches=4, waves=1)


def test_a_good_plan() -> None:
    assert violations(IT, GOOD) == []
    assert violations(LONG, Plan(STAGES, (((0, 2, 4), (0, 2, 4), (1, 3, 5), (1, 3, 5)),))) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(((0,), (1, 2, 3), (4, 5)), (WAVE, WAVE)), "stages of [1, 3, 2] sites instead of [2, 2, 2]"),
        (Plan(((0, 1), (2, 3), (4, 6)), (WAVE, WAVE)), "there are no sites [6]"),
        (Plan(((0, 1), (2, 3), (4, 4)), (WAVE, WAVE)), "s4 holds 2 stages"),
        (Plan(STAGES, (WAVE,)), "waves of [4] microbatches instead of [4, 4]"),
        (Plan(STAGES, (WAVE, ((2, 0), *WAVE[1:]))), "path s2 > s0: does not begin at stage 0"),
        (Plan(STAGES, (WAVE, ((0, 2, 4), *WAVE[1:]))), "path s0 > s2 > s4: 3 stages instead of 2"),
        (Plan(STAGES, (WAVE, ((0, 2), (0, 2), (1, 3), (1, 5)))), "wave 1 visits the stages after the first unequally"),
        (Plan(STAGES, (WAVE, ((0, 2), (0, 4), (0, 3), (1, 5)))), "wave 1 visits s0 3 times, it can hold 2"),
    ],
)
def test_a_broken_constraint(plan: Plan, said: str) -> None:
    assert any(wrong.startswith(said) for wrong in violations(IT, plan)), violations(IT, plan)


def test_a_site_that_is_idle_is_not_visited() -> None:
    it = problem(7, stage_sizes=(2, 2, 2), microbatches=8)
    assert violations(it, Plan(STAGES, (WAVE, ((0, 6), *WAVE[1:])))) == ["paths visit sites [6], which hold no stage"]


@pytest.mark.parametrize(
    ("path", "rules", "said"),
    [
        ((0, 4, 2), Rules(), "1 swaps, 0 are allowed"),
        ((0, 4, 2), Rules(max_swaps=1, max_distance=0), "a swap over 1 stages, 0 are allowed"),
        ((0, 4, 2), Rules(max_swaps=1, max_total=0), "swaps over 1 stages together, 0 are allowed"),
        ((0, 4, 2), Rules(max_swaps=1, max_jump=1), "a jump over 2 stages, 1 are allowed"),
        ((0, 2, 3), Rules(), "visits a stage twice"),
        ((0, 4, 2), Rules(max_swaps=1), ""),
    ],
)
def test_the_order_of_stages(path: Path, rules: Rules, said: str) -> None:
    it = problem(stage_sizes=(2, 2, 2), path_length=3, microbatches=1, waves=1, rules=rules)
    found = [wrong for wrong in violations(it, Plan(STAGES, ((path,),))) if wrong.startswith("path")]
    assert [wrong.partition(": ")[2] for wrong in found] == ([said] if said else [])


def test_replicas_too_far_apart() -> None:
    near = problem(stage_sizes=(2, 2, 2), microbatches=8, max_intra_s=0.4)
    assert violations(near, GOOD) == ["two sites of a stage are 0.5 s apart, more than 0.4"]


@SOME
@given(problems(), st.integers(0, 1000))
def test_a_first_plan_is_allowed(it: Problem, seed: int) -> None:
    plan = random_plan(it, seed)
    assert violations(it, plan) == []
    assert random_plan(it, seed) == plan


def test_loads_of_stages() -> None:
    it = problem(stage_sizes=(2, 2, 2), path_length=2)
    assert stage_loads(it, 5) == (5, 3, 2)
    assert stage_loads(replace(it, path_length=3), 5) == (5, 5, 5)


def test_a_slow_site_has_less_to_do_where_there_is_room() -> None:
    sites = (site("a", memory=6), site("fast", memory=6), site("slow", 3.0, memory=6))
    it = problem(3, stages=2, stage_sizes=(1, 2), microbatches=4, waves=1, sites=sites)
    plan = random_plan(it, 1)
    visits = [path[1] for path in plan.paths]
    if plan.stages[1] == (1, 2):
        assert visits.count(2) < visits.count(1)


def test_too_little_memory_is_named() -> None:
    it = problem(stage_sizes=(2, 2, 2), path_length=3, microbatches=5, waves=1)
    with pytest.raises(
        PierError, match=r"2 sites of stage \d shall hold 5 microbatches in a wave, and have places for 4"
    ):
        random_plan(it, 1)


def test_jumps_that_leave_stages_out_are_named() -> None:
    it = problem(8, stages=4, path_length=2, microbatches=3, waves=1, rules=Rules(max_jump=1))
    said = "equal load cannot be kept: no paths of 2 stages visit all 4 stages equally often with jumps of at most 1"
    with pytest.raises(PierError, match=said):
        random_plan(it, 1)
    assert violations(replace(it, rules=Rules(max_jump=3)), random_plan(replace(it, rules=Rules(max_jump=3)), 1)) == []


NINE_SITES = ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def equal(replicas: int = 3, stages: int = 3, groups: int = 2) -> Problem:
    """As many replicas of every stage, full paths, and so many microbatches for each of them."""
    many = replicas * groups
    sites = tuple(site(f"{number:02}", memory=groups) for number in range(replicas * stages))
    sizes = (replicas,) * stages
    return problem(len(sites), stages, sites=sites, stage_sizes=sizes, path_length=stages, microbatches=many, waves=1)


def stages_of(it: Problem) -> tuple[tuple[int, ...], ...]:
    return random_plan(it, 1).stages


def test_paths_of_a_step() -> None:
    """By hand, with sha256sum: replicas in the order of the hashes of "seed step wave stage visitor name"."""
    ((*paths,),) = random_routes(equal(), NINE_SITES, seed=1, step=0).waves
    assert paths == [(2, 4, 6), (1, 5, 7), (0, 3, 8), (0, 5, 7), (1, 4, 6), (2, 3, 8)]


@SOME
@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 3), st.integers(0, 1000), st.integers(0, 10_000))
def test_each_replica_gets_one_of_each_group(replicas: int, stages: int, groups: int, seed: int, step: int) -> None:
    it = equal(replicas, stages, groups)
    plan = random_routes(it, stages_of(it), seed, step)
    (wave,) = plan.waves
    for start in range(0, len(wave), replicas):
        together = wave[start : start + replicas]
        for stage, sites in enumerate(plan.stages):
            assert {path[stage] for path in together} == {*sites}, "a bijection between the replicas of two stages"
    assert violations(it, plan) == []


def test_all_pairs_of_replicas_occur_equally_often() -> None:
    it, pairs = equal(groups=1), Counter[tuple[int, int]]()
    for step in range(600):
        for path in random_routes(it, NINE_SITES, 1, step).paths:
            pairs.update(pairwise(path))
    wanted = {pair for one, two in pairwise(NINE_SITES) for pair in product(one, two)}
    assert {*pairs} == wanted
    assert min(pairs.values()) > 150, "200 expected, standard deviation 12"


@SOME
@given(problems(), st.integers(0, 1000), st.integers(0, 10_000))
def test_unequal_replicas_and_skips_are_evenly_loaded(it: Problem, seed: int, step: int) -> None:
    most = max(it.memory for it in it.sites)
    it = replace(it, sites=tuple(replace(one, memory=most) for one in it.sites), max_intra_s=None)
    plan = random_routes(it, stages_of(it), seed, step)
    assert violations(it, plan) == []
    for waves in (plan.waves, (plan.paths,)):
        for wave in waves:
            visits = Counter(site for path in wave for site in path)
            for sites in plan.stages:
                loads = [visits[site] for site in sites]
                assert max(loads) - min(loads) <= 1
    assert random_routes(it, plan.stages, seed, step) == plan


def test_names_of_sites_count_and_not_their_order() -> None:
    """Other numbers for the same sites, the same paths."""
    it, turned = equal(), [8, 7, 6, 5, 4, 3, 2, 1, 0]
    other = replace(it, sites=tuple(it.sites[site] for site in turned))
    stages = tuple(tuple(turned.index(site) for site in sites) for sites in NINE_SITES)
    renamed = random_routes(other, stages, 3, 4).paths
    assert [tuple(turned[site] for site in path) for path in renamed] == [*random_routes(it, NINE_SITES, 3, 4).paths]


def test_memory_of_a_small_site_is_kept_and_named() -> None:
    it = equal()
    small = replace(it, sites=(*it.sites[:4], replace(it.sites[4], memory=1), *it.sites[5:]))
    with pytest.raises(PierError, match="2 microbatches of a wave to each site of stage 1, more than 04 can"):
        random_routes(small, NINE_SITES, 1, 0)
    random_routes(replace(small, waves=2), NINE_SITES, 1, 0)


def test_there_and_back() -> None:
    it = problem(max_intra_s=2.0, uplink_s=(0.1,) * 6)
    assert problem_from_json(problem_to_json(it)) == it
    plan = random_plan(it, 1)
    said = json.loads(json.dumps(plan_to_dict(it, plan)))
    assert said["waves"][0][0][0] in said["stages"][0]
    assert plan_from_dict(it, said) == plan


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("stages", 3, "a key that means nothing: stages\nThere are: sites, transfer_s"),
        ("path_length", "two", "path_length: Input should be a valid integer"),
        ("sites", [{"name": "a"}], r"sites\.0\.forward_s: Field required"),
        ("microbatches", 0, "0 microbatches"),
        ("rules", {"max_hops": 1}, "means nothing: rules.max_hops"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, said: str) -> None:
    body = json.loads(problem_to_json(problem())) | {key: value}
    with pytest.raises(PierError, match=said):
        problem_from_json(json.dumps(body))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"sites": 1}', b"\xff\xfe"])
def test_what_is_no_problem(text: str | bytes) -> None:
    with pytest.raises(PierError, match="the problem cannot be read"):
        problem_from_json(text)


@SOME
@given(st.recursive(st.none() | st.integers() | st.text(), lambda it: st.lists(it) | st.dictionaries(st.text(), it)))
def test_noise_is_refused_in_words(body: object) -> None:
    with pytest.raises(PierError):
        problem_from_json(json.dumps(body))


@pytest.mark.parametrize("body", [{}, {"stages": 1, "waves": []}, {"stages": [["nobody"]], "waves": []}])
def test_a_plan_for_others(body: dict[str, object]) -> None:
    with pytest.raises(PierError, match="no plan for these sites"):
        plan_from_dict(problem(), body)
