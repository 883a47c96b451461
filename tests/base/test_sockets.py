"""Folders of sockets, and what becomes of those whose process was killed."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pier_node.base import processes
from pier_node.base.processes import SocketFolder

KILLED = """
import os, signal, sys
from pathlib import Path
from pier_node.base import processes

processes.TEMPORARY = Path(sys.argv[1])
(processes.SocketFolder("workers").path / "socket").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "TEMPORARY", tmp_path)
    return tmp_path


def test_a_folder_is_for_this_user_alone_and_goes_when_it_is_told_to(temporary: Path) -> None:
    folder = SocketFolder("workers")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert [*temporary.iterdir()] == [folder.path]
    for _ in range(2):
        folder.remove()
        assert [*temporary.iterdir()] == []


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, temporary], check=False)
    (left,) = temporary.iterdir()
    assert (left / "socket").exists()
    folder = SocketFolder("workers")
    assert [*temporary.iterdir()] == [folder.path]
    folder.remove()


def test_what_is_in_use_or_of_others_stays(temporary: Path) -> None:
    (temporary / "pier-of-something-else").mkdir()
    folders = [SocketFolder(kind) for kind in ("workers", "p2pd-1", "workers")]
    assert len([*temporary.iterdir()]) == 4
    for folder in folders:
        folder.remove()
