from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pier_node.base.shared import SharedVector
from pier_node.doctor.finding import Verdict
from pier_node.doctor.machine import CHECKPOINT_BYTES, disk_finding, free_disk
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.checkpoint import KEEP, Checkpoint, CheckpointStore

MILLION = 1_000_000


@pytest.mark.parametrize("sync", [False, True])
def test_a_checkpoint_is_as_large_as_is_said(tmp_path: Path, sync: bool) -> None:
    """With everything in it that may be; what describes it is small."""

    def vector() -> SharedVector:
        made = SharedVector(MILLION)
        made.array[:] = np.random.default_rng(1).standard_normal(MILLION)
        return made

    names = (ANCHOR, MOMENTUM, ADAM_M, ADAM_V) if sync else (ANCHOR, MOMENTUM)
    state = OuterState(1, ("a",), {name: vector() for name in names}, {"a": 1}, int(sync))
    first, second = (None, None) if sync else (vector(), vector())
    folder = CheckpointStore(tmp_path, bytes(32)).save(Checkpoint(state, first, second, 1, 1, 1, vector(), (1,)))
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size == pytest.approx(CHECKPOINT_BYTES * MILLION, rel=0.01)


def test_enough_disk(tmp_path: Path) -> None:
    finding = disk_finding(tmp_path, MILLION, free=60 * MILLION)
    assert finding.verdict is Verdict.OK
    assert finding.values["needed_bytes"] == (KEEP + 1) * CHECKPOINT_BYTES * MILLION == 60 * MILLION
    assert finding.detail == f"checkpoints need 60 MB in {tmp_path}; 60 MB free"


def test_low_disk_says_how_much_to_free(tmp_path: Path) -> None:
    finding = disk_finding(tmp_path, MILLION, free=50 * MILLION)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.remedy == "Free 10 MB on that disk, or give a --data folder on a larger one."


def test_checkpoints_that_are_there_need_no_more(tmp_path: Path) -> None:
    old = tmp_path / "checkpoints" / "round-00000001" / "state.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(MILLION))
    finding = disk_finding(tmp_path, MILLION, free=59 * MILLION)
    assert finding.verdict is Verdict.OK
    assert "59 MB more" in finding.detail
    assert disk_finding(tmp_path, 1000, free=0).verdict is Verdict.OK


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "not" / "yet") == pytest.approx(free_disk(tmp_path), rel=0.01)
    assert free_disk(tmp_path) > 0
