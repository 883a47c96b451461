from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pier_node.config.run import RunConfig, load

Call = Callable[..., Result]


def test_it_writes_run_toml_where_one_is(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("init")
    assert done.exit_code == 0
    assert "pier-node start --run run.toml" in done.output
    assert load(tmp_path / "run.toml") == RunConfig()


def test_a_preset_is_taken(call: Call, tmp_path: Path) -> None:
    assert call("init", tmp_path / "big.toml", "--preset", "gpt2-xl").exit_code == 0
    assert load(tmp_path / "big.toml").model.layers == 48


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do(call: Call, tmp_path: Path) -> None:
    failed = call("init", tmp_path / "run.toml", "--preset", "gpt9")
    assert failed.exit_code == 2
    assert "llama-1m" in failed.output
    assert not (tmp_path / "run.toml").exists()


def test_what_exists_is_not_overwritten_unless_forced(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    failed = call("init", path)
    assert failed.exit_code == 1
    assert "--force" in failed.output
    assert path.read_text() == "mine"
    assert call("init", path, "--force").exit_code == 0
    assert load(path) == RunConfig()


def test_a_folder_that_does_not_exist_is_said(call: Call, tmp_path: Path) -> None:
    failed = call("init", tmp_path / "no" / "run.toml")
    assert failed.exit_code == 1
    assert "No such file or directory" in failed.output
