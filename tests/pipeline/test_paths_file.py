"""Paths that a planner has left, for who looks, and what the coordinator is told of them, and when."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.pipeline import paths_file
from pier_node.pipeline.paths_file import EVERY, Drawn, LatestPaths, parse_paths, paths_json, read_paths, write_paths
from pier_node.pipeline.planning.plan import Plan, random_plan
from pier_node.pipeline.planning.problem import Problem, Site, stage_sizes
from pier_node.pipeline.planning.simulator import makespan, simulate

SITES = tuple(Site(name, 1.0, 2.0, 0.5, 3) for name in "abcd")
NEAR = tuple(tuple(0.0 if a == b else 0.1 for b in range(4)) for a in range(4))
PROBLEM = Problem(SITES, NEAR, (1, 2, 1), 2, 2)
PLAN = Plan(((0,), (1, 2), (3,)), (((0, 1), (0, 3)),))


def test_what_was_written_is_read_with_the_names_of_sites(tmp_path: Path) -> None:
    write_paths(tmp_path / "paths.json", 3, PROBLEM, PLAN)
    drawn = read_paths(tmp_path / "paths.json", {"a": "alpha", "c": "gamma"})
    assert (drawn.round, drawn.plan) == (3, PLAN)
    assert [site.name for site in drawn.problem.sites] == ["alpha", "b", "gamma", "d"]
    assert drawn.problem.title == "2 microbatches through 2 of 3 stages"
    assert drawn.victim() == ("gamma", 1)


def test_other_times_have_the_same_key(tmp_path: Path) -> None:
    write_paths(tmp_path / "paths.json", 3, PROBLEM, PLAN)
    first = read_paths(tmp_path / "paths.json", {}).key
    write_paths(tmp_path / "paths.json", 4, replace(PROBLEM, uplink_s=(0.1,) * 4), PLAN)
    assert read_paths(tmp_path / "paths.json", {}).key == first


def test_other_paths_have_another_key(tmp_path: Path) -> None:
    write_paths(tmp_path / "paths.json", 3, PROBLEM, PLAN)
    first = read_paths(tmp_path / "paths.json", {}).key
    write_paths(tmp_path / "paths.json", 3, PROBLEM, Plan(PLAN.stages, (((0, 2), (0, 3)),)))
    assert read_paths(tmp_path / "paths.json", {}).key != first


@given(st.one_of(st.binary(max_size=50), st.integers(0, 2000)))
def test_what_is_none_is_refused(said: bytes | int) -> None:
    """Noise, or what was written with one wrong byte."""
    content = bytearray(paths_json(3, PROBLEM, PLAN))
    if isinstance(said, int):
        content[said % len(content)] ^= 1 + said % 255
    with suppress(PierError, ValueError, KeyError, TypeError):
        parse_paths(said if isinstance(said, bytes) else bytes(content), {})


OTHER = Plan(PLAN.stages, (((0, 2), (0, 3)),))


class Planned:
    """Paths that come one after the other, long enough after each other unless said otherwise."""

    def __init__(self, folder: Path) -> None:
        self.now, self.file = 0.0, folder / "paths.json"
        self.latest = LatestPaths(self.file, lambda: self.now)

    def told(self, round: int, problem: Problem = PROBLEM, plan: Plan = PLAN, after: float = EVERY) -> int:
        """The round of what the coordinator is told then."""
        self.now += after
        self.latest.planned(round, problem, plan)
        assert self.latest.message is not None
        return self.latest.message.round


def slower(problem: Problem, times: float) -> Problem:
    sites = tuple(replace(site, backward_s=site.backward_s * times) for site in problem.sites)
    return replace(problem, sites=sites)


def test_it_is_told_what_is_on_the_disk(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    assert planned.latest.message is None
    assert planned.told(3) == 3
    assert planned.latest.message is not None
    told, kept = parse_paths(planned.latest.message.content, {}), read_paths(planned.file, {})
    assert (told.round, told.plan, told.key) == (kept.round, kept.plan, kept.key)
    assert told.problem.sites == kept.problem.sites


def test_only_news_is_told(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    planned.told(3)
    first = planned.latest.message
    assert planned.told(4) == 3
    assert planned.told(5, slower(PROBLEM, 1.1)) == 3, "not so much slower that other paths may be better"
    assert planned.latest.message is first, "the client knows by this that it is no news"
    assert planned.told(6, slower(PROBLEM, 4.0)) == 6
    assert planned.told(7, slower(PROBLEM, 4.0), OTHER) == 7
    fewer = replace(PROBLEM, sites=(*PROBLEM.sites[:3], replace(PROBLEM.sites[3], name="e")))
    assert planned.told(8, fewer, OTHER) == 8


def test_news_that_come_fast_wait_for_the_next(tmp_path: Path) -> None:
    planned = Planned(tmp_path)
    planned.told(3)
    assert planned.told(4, plan=OTHER, after=EVERY / 2) == 3
    assert read_paths(planned.file, {}).round == 4
    assert planned.told(5, plan=OTHER, after=EVERY / 2) == 5


def crowd(count: int, stages: int, microbatches: int) -> tuple[Problem, Plan]:
    """Unequal sites on unequal links, and paths through all stages."""
    dice = random.Random(count)
    sites = tuple(
        Site(f"{dice.getrandbits(64):016x}", dice.uniform(0.5, 1), dice.uniform(1, 2), dice.uniform(0.1, 0.3), 400)
        for _ in range(count)
    )
    lines = tuple(dice.uniform(0.01, 0.3) for _ in sites)
    links = tuple(tuple(0.0 if a == b else lines[a] * dice.uniform(0.5, 2) for b in range(count)) for a in range(count))
    sizes = stage_sizes(count, stages, stages)
    problem = Problem(sites, links, sizes, stages, microbatches, 1, uplink_s=lines)
    return problem, random_plan(problem, 1)


def told_of(file: Path, problem: Problem, plan: Plan) -> Drawn:
    """What the coordinator reads of a plan that is written to this file."""
    latest = LatestPaths(file)
    latest.planned(3, problem, plan)
    assert latest.message is not None
    return parse_paths(latest.message.content, {})


def test_a_large_pipeline_is_told(tmp_path: Path) -> None:
    problem, plan = crowd(128, stages=8, microbatches=400)
    assert told_of(tmp_path / "paths.json", problem, plan).plan == plan
    assert read_paths(tmp_path / "paths.json", {}).problem == problem, "the file has all that is known"


def test_what_is_told_takes_as_long_as_what_was_planned(tmp_path: Path) -> None:
    problem, plan = crowd(12, stages=3, microbatches=20)
    told = told_of(tmp_path / "paths.json", problem, plan)
    assert simulate(told.problem, told.plan).makespan_s == pytest.approx(makespan(problem, plan), rel=0.005)


def test_what_is_too_large_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths_file, "MOST_BYTES", 100)
    latest = LatestPaths(tmp_path / "paths.json")
    latest.planned(3, PROBLEM, PLAN)
    assert latest.message is None
