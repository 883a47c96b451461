"""Paths that a planner has left, for who looks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.pipeline.paths_file import parse_paths, paths_json, read_paths, write_paths
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem, Site

SITES = tuple(Site(name, 1.0, 2.0, 0.5, 3) for name in "abcd")
NEAR = tuple(tuple(0.0 if a == b else 0.1 for b in range(4)) for a in range(4))
PROBLEM = Problem(SITES, NEAR, (1, 2, 1), 2, 2)
PLAN = Plan(((0,), (1, 2), (3,)), (((0, 1), (0, 3)),))


def test_what_was_written_is_read_with_the_names_of_sites(tmp_path: Path) -> None:
    write_paths(tmp_path / "paths.json", 3, PROBLEM, PLAN)
    drawn = read_paths(tmp_path / "paths.json", {"a": "alpha", "c": "gamma"})
    assert (drawn.round, drawn.plan) == (3, PLAN)
    assert [site.name for site in drawn.problem.sites] == ["alpha", "b", "gamma", "d"]
    assert drawn.title == "2 microbatches through 2 of 3 stages"
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
