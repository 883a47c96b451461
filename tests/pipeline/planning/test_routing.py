"""Random routing: equal load, all pairs, the same for everybody (spec/noloco.md section 3.3)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.planning.cases import SOME, problem, problems, site

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.check import violations
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.routing import random_routes
from pier_node.pipeline.planning.start import random_plan

STAGES = ((0, 1, 2), (3, 4, 5), (6, 7, 8))


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
    ((*paths,),) = random_routes(equal(), STAGES, seed=1, step=0).waves
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
        for path in random_routes(it, STAGES, 1, step).paths:
            pairs.update(pairwise(path))
    wanted = {pair for one, two in pairwise(STAGES) for pair in product(one, two)}
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
    """spec/skippipe.md section 7, property 6: other numbers for the same sites, the same paths."""
    it, turned = equal(), [8, 7, 6, 5, 4, 3, 2, 1, 0]
    other = replace(it, sites=tuple(it.sites[site] for site in turned))
    stages = tuple(tuple(turned.index(site) for site in sites) for sites in STAGES)
    renamed = random_routes(other, stages, 3, 4).paths
    assert [tuple(turned[site] for site in path) for path in renamed] == [*random_routes(it, STAGES, 3, 4).paths]


def test_memory_of_a_small_site_is_kept_and_named() -> None:
    it = equal()
    small = replace(it, sites=(*it.sites[:4], replace(it.sites[4], memory=1), *it.sites[5:]))
    with pytest.raises(PierError, match="2 microbatches of a wave to each site of stage 1, more than 04 can"):
        random_routes(small, STAGES, 1, 0)
    random_routes(replace(small, waves=2), STAGES, 1, 0)
