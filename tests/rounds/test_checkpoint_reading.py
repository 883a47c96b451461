"""Reading checkpoints beside the daemon that saves them: pier-node export, evaluate, generate, status."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds import checkpoint as checkpoints
from pier_node.rounds.checkpoint import Checkpoint, CheckpointStore

RUN = bytes(range(32))


def at(round: int) -> Checkpoint:
    tensors = {name: SharedVector(10) for name in (ANCHOR, MOMENTUM)}
    tensors[ANCHOR].array[:] = np.arange(10) + round
    return Checkpoint(OuterState(round, ("a",), tensors, {"a": round}), None, None, 0, 0, 0, None, ())


def test_the_newest_whole_state_is_read_and_nothing_is_changed(tmp_path: Path) -> None:
    store, reader = CheckpointStore(tmp_path, RUN), CheckpointStore(tmp_path, RUN)
    assert reader.peek() is None
    assert reader.newest_state() is None
    store.save(at(7))
    store.save(at(8))
    peeked = reader.peek()
    assert peeked
    assert (peeked[0].name, peeked[1]["round"]) == ("round-00000008", 8)
    (tmp_path / "round-00000008" / "state.safetensors").write_bytes(b"torn")
    state = reader.newest_state()
    assert state
    assert state.digest == at(7).state.digest
    assert sorted(os.listdir(tmp_path)) == ["round-00000007", "round-00000008"]


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, RUN).save(at(7))
    for read in (CheckpointStore(tmp_path, bytes(32)).peek, CheckpointStore(tmp_path, bytes(32)).newest_state):
        with pytest.raises(PierError, match="another run"):
            read()


def test_the_folder_is_listed_again_when_the_daemon_overtook_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = CheckpointStore(tmp_path, RUN, keep=1), checkpoints.read_state
    store.save(at(7))

    def overtaken(folder: Path, record: dict[str, object]) -> OuterState:
        if folder.name == "round-00000007":
            store.save(at(8))
        return read(folder, record)

    monkeypatch.setattr(checkpoints, "read_state", overtaken)
    state = CheckpointStore(tmp_path, RUN).newest_state()
    assert state
    assert state.round == 8
