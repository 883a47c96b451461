"""`pier-node start` ends with words, whatever the disk says."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from click.testing import CliRunner

from pier_node.cli import main
from pier_node.daemon import Daemon


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


def test_any_other_error_of_the_system_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Daemon) -> None:
        raise ConnectionResetError("what a bug may leave")

    monkeypatch.setattr(Daemon, "run", run)
    done = CliRunner().invoke(main, ["start", "--data", str(tmp_path)])
    assert isinstance(done.exception, ConnectionResetError)
