from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier_node.config.run import RunConfig
from pier_node.rounds.folder import save_run
from pier_node.trainer.early_start import start_early


@pytest.mark.thorough
async def test_a_run_with_the_own_trainer_is_started_early_and_ends_when_it_is_not_needed(tmp_path: Path) -> None:
    save_run(tmp_path, RunConfig())
    early = start_early(tmp_path, 1)
    assert early is not None
    assert early.waits
    early.tell({})
    assert await early.wait() == 0


OTHERS: list[Any] = [None, [], {"pipeline": None}, {"pipeline": {"stages": 4}}, {"program": {"step_tokens": 1}}]


@pytest.mark.parametrize("run", OTHERS)
def test_other_folders_have_none(tmp_path: Path, run: Any) -> None:
    if run is not None:
        (tmp_path / "run.json").write_text(json.dumps(run))
    assert start_early(tmp_path, 1) is None
    (tmp_path / "run.json").write_bytes(b"\xff torn")
    assert start_early(tmp_path, 1) is None
