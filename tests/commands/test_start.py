"""`pier-node start` ends with words, whatever the disk says."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from pier_node.cli import main
from pier_node.commands import daemon
from pier_node.site.daemon import Daemon
from pier_node.site.settings import Settings

NOBODY = 65534


@pytest.mark.parametrize("name", ["votes.json", None])
def test_a_full_disk_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    async def run(self: Daemon) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        error.filename = name
        raise error

    monkeypatch.setattr(Daemon, "run", run)
    done = CliRunner().invoke(main, ["start", "--data", str(tmp_path)])
    assert done.exit_code == 1
    assert f"Error: {name or tmp_path}: No space left on device\nFree some space there" in done.output


def test_a_coordinator_without_a_port_is_called_at_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(daemon, "run_site", lambda settings, *_: seen.append(settings))
    CliRunner().invoke(main, ["start", "--coordinator", "example.org"], catch_exceptions=False)
    assert seen[0].coordinator == "example.org:7790"


def test_a_folder_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = tmp_path / "run.toml"
    run.write_text("")
    done = CliRunner().invoke(main, ["start", "--run", str(run), "--data", str(tmp_path / "file" / "site")])
    assert done.exit_code == 1
    assert f"Error: {tmp_path / 'file' / 'site'}" in done.output
    assert ": Not a directory\n" in done.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_is_said_in_words(tmp_path: Path) -> None:
    run = Path(tempfile.mkdtemp(dir="/tmp")) / "run.toml"
    lines = "".join(f"# {number}\n" for number in range(100_000))  # enough for a window, also for validation
    run.write_text(f'[data]\nsource = "text"\npath = "{run}"\nvalidation = 0.5\n{lines}')
    run.parent.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        done = CliRunner().invoke(main, ["start", "--run", str(run), "--data", str(run.parent / "site")])
    finally:
        os.seteuid(0)
        shutil.rmtree(run.parent)
    assert done.exit_code == 1
    assert f"Error: {run.parent / 'site'}: Permission denied\n" in done.output


@pytest.mark.parametrize(
    "words", [["start"], ["status"], ["status", "--json"], ["stop"], ["export", "out"], ["evaluate"], ["generate", "a"]]
)
def test_a_mistyped_folder_is_refused_and_not_made(tmp_path: Path, words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, "--data", str(tmp_path / "mistyped")])
    assert done.exit_code == 1
    assert "Error: " in done.output
    assert "--data folder" in done.output
    assert not (tmp_path / "mistyped").exists()


def test_any_other_error_of_the_system_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Daemon) -> None:
        raise ConnectionResetError("what a bug may leave")

    monkeypatch.setattr(Daemon, "run", run)
    done = CliRunner().invoke(main, ["start", "--data", str(tmp_path)])
    assert isinstance(done.exception, ConnectionResetError)
