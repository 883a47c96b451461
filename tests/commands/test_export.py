from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from commands.conftest import TABLES, save_round
from processes.run import Run

from pier_node.config.run import RunConfig
from pier_node.rounds.folder import save_run
from pier_node.trainer.model.export import import_weights

Call = Callable[..., Result]


def test_the_newest_checkpoint_becomes_a_model_folder(call: Call, site: Path, tmp_path: Path) -> None:
    state = save_round(site, 4)
    done = call("export", "--data", site, tmp_path / "out")
    assert done.exit_code == 0
    assert "round 4 of run 'small'" in done.output
    config, flat = import_weights(tmp_path / "out")
    assert config.dim == 32
    assert torch.equal(flat, torch.from_numpy(state.anchor))


def test_an_earlier_export_is_replaced_and_other_folders_are_left_alone(call: Call, site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("export", "--data", site, out).exit_code == 0
    state = save_round(site, 5)
    assert call("export", "--data", site, out).exit_code == 0
    assert torch.equal(import_weights(out)[1], torch.from_numpy(state.anchor))
    refused = call("export", "--data", site, site)
    assert refused.exit_code == 1
    assert "did not write what is in it" in refused.output
    assert not (site / "config.json").exists()


def test_a_model_of_somebody_else_is_replaced_only_by_force(call: Call, site: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    theirs = {"config.json": "{}", "tokenizer_config.json": "{}", "model.safetensors": "a year of work"}
    for name, text in theirs.items():
        (out / name).write_text(text)
    refused = call("export", "--data", site, out)
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert {path.name: path.read_text() for path in out.iterdir()} == theirs
    assert call("export", "--data", site, "--force", out).exit_code == 0
    assert import_weights(out)[0].dim == 32


def test_a_site_without_a_checkpoint_is_said(call: Call, tmp_path: Path) -> None:
    failed = call("export", "--data", tmp_path / "none", tmp_path / "out")
    assert failed.exit_code == 1
    assert "none: no such folder" in failed.output
    (tmp_path / "none").mkdir()
    assert "belongs to no run yet" in call("export", "--data", tmp_path / "none", tmp_path / "out").output
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_it_works_while_the_daemon_saves_one_round_after_the_other(call: Call, run: Run, tmp_path: Path) -> None:
    alpha = run.sites[0]
    for number in range(5):
        before, done = alpha.round, call("export", "--data", alpha.folder, tmp_path / "out")
        assert done.exit_code == 0, done.output
        exported = int(done.output.split("round ")[1].split()[0])
        assert before <= exported + 1
        assert import_weights(tmp_path / "out")[1].isfinite().all()
        alpha.reach(before + 1 + number % 2)


def test_a_site_that_holds_a_stage_says_who_has_the_model(call: Call, tmp_path: Path) -> None:
    tables = {**TABLES, "pipeline": {"stages": 2}}
    (tmp_path / "site").mkdir()
    save_run(tmp_path / "site", RunConfig.model_validate(tables))
    failed = call("export", "--data", tmp_path / "site", tmp_path / "out")
    assert failed.exit_code == 1
    assert "its site holds one stage of it" in failed.output
    assert "Sites of stage 0 join the stages" in failed.output
