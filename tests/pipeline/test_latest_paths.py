"""What the coordinator is told of the paths that a site has planned, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pipeline.test_paths_file import PLAN, PROBLEM

from pier_node.pipeline import paths_file
from pier_node.pipeline.paths_file import EVERY, LatestPaths, parse_paths, read_paths
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem

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
    assert parse_paths(planned.latest.message.content, {}) == read_paths(planned.file, {})


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


def test_what_is_too_large_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths_file, "MOST_BYTES", 100)
    latest = LatestPaths(tmp_path / "paths.json")
    latest.planned(3, PROBLEM, PLAN)
    assert latest.message is None
