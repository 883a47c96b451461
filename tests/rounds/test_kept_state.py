from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rounds.cases import outer_state

from pier_node.base.errors import PierError
from pier_node.outer.state import OuterState
from pier_node.rounds.checkpoint import RECORD, STATE
from pier_node.rounds.kept_state import KeptStates

RUN = bytes(32)


@pytest.fixture
def kept(tmp_path: Path) -> KeptStates:
    return KeptStates(tmp_path / "states", RUN)


def state(round: int) -> OuterState:
    return outer_state(["a1", "b2"], round=round, anchor=[round, 2.0], a1=7)


def test_nothing_at_first(kept: KeptStates) -> None:
    assert kept.after(0) is None


def test_the_newest_comes_back_whole(kept: KeptStates) -> None:
    for round in (1, 2, 3):
        kept.save(state(round))
    found = kept.after(2)
    assert found is not None
    assert (found.round, found.digest, found.ledger) == (3, state(3).digest, {"a1": 7})
    assert kept.after(3) is None


def test_two_are_kept(kept: KeptStates, tmp_path: Path) -> None:
    for round in range(1, 12):
        kept.save(state(round))
    assert sorted(folder.name for folder in (tmp_path / "states").iterdir()) == ["round-00000010", "round-00000011"]


@pytest.mark.parametrize("file", [RECORD, STATE])
def test_one_that_was_being_written_is_passed_over(kept: KeptStates, tmp_path: Path, file: str) -> None:
    kept.save(state(4))
    kept.save(state(5))
    path = tmp_path / "states" / "round-00000005" / file
    path.write_bytes(path.read_bytes()[:-9])
    found = kept.after(0)
    assert found is not None
    assert found.round == 4


def test_those_of_another_run_are_not_used(kept: KeptStates, tmp_path: Path) -> None:
    kept.save(state(4))
    assert KeptStates(tmp_path / "states", bytes(31) + b"1").after(0) is None


def test_a_disk_that_fails_is_told(kept: KeptStates, tmp_path: Path) -> None:
    kept.save(state(4))
    shutil.rmtree(tmp_path / "states")
    (tmp_path / "states").touch()
    with pytest.raises(PierError, match="cannot keep the state of round 5"):
        kept.save(state(5))


def test_one_can_be_dropped_also_twice(kept: KeptStates) -> None:
    kept.save(state(4))
    kept.save(state(5))
    assert kept.rounds() == [5, 4]
    for _ in range(2):
        kept.drop(5)
        assert kept.rounds() == [4]
    assert kept.of(5) is None
