"""What a replica did by itself counts if the round says so, also after a start; it is dropped when nobody can say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.base.shared import SharedVector
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, OuterState
from pier_node.pipeline.stage_state import BASE, MICROBATCHES, Own
from pier_node.pipeline.vote_state import round_of, version


def step(round: int, tag: int = 7) -> OuterState:
    tensors = {name: SharedVector(3) for name in (ANCHOR, ADAM_M, ADAM_V)}
    tensors[ANCHOR].array[:] = round
    return OuterState(version(round, tag), (), tensors, {BASE: 0, MICROBATCHES: round}, round)


def in_full(_before: OuterState, _record: OuterState) -> OuterState:
    raise AssertionError("no step was kept as a record")


FIRST, SECOND = version(1, 7), version(2, 7)


@pytest.fixture
def own(tmp_path: Path) -> Own:
    """One step counts, the next is under way."""
    made = Own(tmp_path, b"run", in_full)
    made.keep(step(1))
    assert made.settle({FIRST}, FIRST, 1)
    made.keep(step(2))
    return made


def again(tmp_path: Path, decided: int, counted: int = FIRST) -> Own:
    made = Own(tmp_path, b"run", in_full)
    made.resume(decided, counted, ready=round_of(counted))
    return made


def at(own: Own) -> int | None:
    return own.state.round if own.state else None


def test_a_step_that_counts_is_taken(own: Own, tmp_path: Path) -> None:
    assert at(own) == FIRST
    assert own.settle({SECOND}, SECOND, 2)
    assert (at(own), at(again(tmp_path, 2, SECOND))) == (SECOND, SECOND)


@pytest.mark.parametrize("counted", [FIRST, version(2, 8)])
def test_a_step_that_does_not_is_dropped_for_good(own: Own, tmp_path: Path, counted: int) -> None:
    assert not own.settle({counted}, counted, 2)
    assert (at(own), at(again(tmp_path, 9))) == (FIRST, FIRST)


@pytest.mark.parametrize(("counted", "expected"), [(SECOND, SECOND), (FIRST, FIRST), (version(3, 7), None)])
def test_after_a_start_the_round_decides_too(own: Own, tmp_path: Path, counted: int, expected: int | None) -> None:
    back = again(tmp_path, 1)
    assert at(back) == FIRST
    assert not back.settle({FIRST}, FIRST, 1)
    back.settle({counted}, counted, 3)
    assert (at(back), at(again(tmp_path, 9, counted))) == (expected, expected)


@pytest.mark.parametrize(("counted", "ready"), [(FIRST, 1), (version(2, 8), 2), (version(3, 7), 1)])
def test_a_step_whose_outcome_was_known_as_the_site_died_counts_only_if_it_did(
    own: Own, tmp_path: Path, counted: int, ready: int
) -> None:
    assert at(own) == FIRST
    for _ in range(2):
        back = Own(tmp_path, b"run", in_full)
        back.resume(3, counted, ready)
        assert at(back) == FIRST


def test_of_two_attempts_at_one_round_the_one_that_counts_is_taken(own: Own, tmp_path: Path) -> None:
    back = again(tmp_path, 1)
    back.keep(step(2, tag=9))
    assert back.settle({SECOND}, SECOND, 2)
    assert (at(back), at(again(tmp_path, 2, SECOND))) == (SECOND, SECOND)


def test_more_attempts_than_the_disk_keeps_are_settled_too(own: Own) -> None:
    for tag in (8, 9, 10):
        own.keep(step(2, tag))
    assert own.settle({SECOND}, SECOND, 2)
    assert at(own) == SECOND


def test_a_version_of_the_stage_is_as_good_a_proof(own: Own) -> None:
    assert own.settle({SECOND, version(5, 1)}, version(5, 1), 5)
    assert at(own) == SECOND
