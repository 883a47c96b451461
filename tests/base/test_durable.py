from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.durable import Torn, read_sealed, replace, seal, sync, unwritable
from pier_node.base.errors import PierError

FIELDS = {"round": 42, "members": ["a", "b"], "name": "φ", "nested": {"x": [1, 2.5, None]}}


def test_what_is_sealed_is_read_back(tmp_path: Path) -> None:
    replace(tmp_path / "file", seal(FIELDS))
    assert read_sealed(tmp_path / "file") == FIELDS
    replace(tmp_path / "file", seal({}))
    assert read_sealed(tmp_path / "file") == {}
    assert os.listdir(tmp_path) == ["file"]


@given(position=st.integers(0, len(seal(FIELDS)) - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_read(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    data = bytearray(seal(FIELDS))
    data[position] ^= 1 << bit
    path = tmp_path_factory.mktemp("flipped") / "file"
    path.write_bytes(data)
    with suppress(Torn):
        assert read_sealed(path) == FIELDS, "only the space between fields may change"


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'{"round": 1}', seal(FIELDS)[:-2], b"\xff"])
def test_torn_files_are_noticed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(Torn, match="file"):
        read_sealed(tmp_path / "file")


def test_a_missing_file_is_torn(tmp_path: Path) -> None:
    with pytest.raises(Torn, match="file: No such file"):
        read_sealed(tmp_path / "file")


def test_a_file_that_may_not_be_read_is_not_called_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PierError, match="Permission denied") as error:
        read_sealed(tmp_path / "file")
    assert "user that owns" in error.value.remedy


def test_the_new_bytes_are_on_the_disk_before_they_get_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    seen: list[tuple[str, bytes]] = []

    def watch(path: Path) -> None:
        sync(path)
        seen.append((path.name, (tmp_path / "file").read_bytes()))

    monkeypatch.setattr("pier_node.base.durable.sync", watch)
    replace(tmp_path / "file", b"new")
    assert seen == [("file.tmp", b"old"), (tmp_path.name, b"new")]


FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from pier_node.base.durable import replace
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    replace(Path(sys.argv[1]), bytes(10_000))
except OSError as error:
    print(error.strerror)
"""


def test_a_disk_that_is_full_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    command = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "File too large\n"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "Free some space"), (errno.EACCES, "as the user"), (errno.EROFS, "writable"), (errno.EIO, "log")],
)
def test_the_remedy_fits_what_went_wrong(code: int, remedy: str) -> None:
    error = unwritable("cannot save a checkpoint", OSError(code, os.strerror(code)))
    assert error.problem == f"cannot save a checkpoint: {os.strerror(code)}"
    assert remedy in error.remedy
