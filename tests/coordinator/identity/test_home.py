"""The folder of a run at its coordinator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from coordinator.cases import ALICE

from pier_coordinator.commands.start import init, run_name
from pier_coordinator.identity.home import DAEMON_FILE, OPERATOR_FILE, RUN_FILE, Home
from pier_node.base.errors import PierError
from pier_node.identity.certificates import check_issued


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert "pier-coordinator start" in init(tmp_path / "my-run", "llama-tiny")
    return tmp_path / "my-run"


def test_a_folder_is_made_once(folder: Path) -> None:
    with pytest.raises(PierError, match="exists"):
        init(folder, "llama-tiny")
    assert Home.found(folder).config.model.preset == "llama-tiny"


def test_the_coordinator_is_the_witness_of_its_run(folder: Path) -> None:
    assert Home.found(folder).config.run.witness


def test_a_run_is_named_after_its_folder(folder: Path) -> None:
    assert Home.found(folder).config.run.name == "my-run"


@pytest.mark.parametrize(
    ("folder", "name"),
    [("three sites!", "three-sites"), (".hidden", "hidden"), ("a" * 80, "a" * 64), ("v1.2_x", "v1.2_x"), ("é", "")],
)
def test_what_a_run_s_name_may_not_have_is_left_out(tmp_path: Path, folder: str, name: str) -> None:
    assert run_name(tmp_path / folder) == name
    init(tmp_path / folder, "llama-tiny")
    assert Home.found(tmp_path / folder).config.run.name == (name or "run")


def test_a_folder_without_a_run_is_told_from_one(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"has no run\.toml") as error:
        Home.found(tmp_path)
    assert "pier-coordinator init" in error.value.remedy


def test_secrets_last_and_are_for_their_owner_only(folder: Path) -> None:
    first, again = Home(folder), Home(folder)
    assert (first.operator, first.token, first.identity.node) == (again.operator, again.token, again.identity.node)
    for name in (OPERATOR_FILE, "run.token", "node.key"):
        assert (folder / name).stat().st_mode & 0o077 == 0


def test_a_run_does_not_change(folder: Path) -> None:
    _ = Home(folder).token
    path = folder / RUN_FILE
    path.write_text(path.read_text().replace("seed = 1", "seed = 2", 1))
    with pytest.raises(PierError, match="has changed since the run began"):
        _ = Home(folder).token


def test_it_certifies_sites(folder: Path) -> None:
    home = Home(folder)
    check_issued(home.authority.certify(ALICE.key.public_key()), home.credentials().ca_pem, ALICE)


def test_the_coordinator_that_runs_can_be_found(folder: Path) -> None:
    home = Home(folder)
    home.announce("10.0.0.1:7790", "http://127.0.0.1:7780")
    told = json.loads((folder / DAEMON_FILE).read_text())
    assert told == {"pid": os.getpid(), "address": "10.0.0.1:7790", "http": "http://127.0.0.1:7780"}
    home.leave()
    home.leave()
    assert not (folder / DAEMON_FILE).exists()


def test_a_full_disk_at_the_start_is_said(folder: Path) -> None:
    (folder / f"{DAEMON_FILE}.tmp").symlink_to("/dev/full")
    with pytest.raises(PierError, match=f"{DAEMON_FILE}: No space left on device"):
        Home(folder).announce("10.0.0.1:7790", "")
