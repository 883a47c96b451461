"""A site's own notes survive a restart, and a data folder belongs to one daemon at a time."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.rounds.folder import (
    SITE_FILE,
    SiteRecord,
    claim,
    load_run,
    read_events,
    require_claimed,
    save_run,
    unwritable,
)
from pier_proto.v1.peer_pb2 import Site

PEER = Site(node="b" * 16, name="lab-b", address="10.0.0.2:7700", slot=1)


def test_the_first_start_has_no_record(tmp_path: Path) -> None:
    assert SiteRecord.load(tmp_path) is None
    assert load_run(tmp_path) is None


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = SiteRecord(True, 2, (), "hivemind", "lab-a", "0.0.0.0:7701", "example.org", "/text").with_peers([PEER])
    record.save(tmp_path)
    loaded = SiteRecord.load(tmp_path)
    assert loaded == record
    assert loaded.sites() == [PEER]


def test_a_line_that_is_not_whole_yet_is_not_read() -> None:
    assert read_events(b"") == []
    assert read_events(b'{"round"') == []
    assert read_events(b'{"round":1}\n{"round":2}\n{"rou') == [{"round": 1}, {"round": 2}]


def test_a_line_that_a_power_cut_tore_is_skipped() -> None:
    assert read_events(b'{"round":1}\n\0\0\0\n{"rou\n{"round":2}\n') == [{"round": 1}, {"round": 2}]


def test_a_torn_record_says_what_to_do(tmp_path: Path) -> None:
    SiteRecord(founder=False, slot=0).save(tmp_path)
    path = tmp_path / SITE_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(PierError, match="--peers and --token again"):
        SiteRecord.load(tmp_path)


def test_the_run_of_a_folder_comes_back_with_the_same_hash(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"name": "mine", "seed": 7}})
    save_run(tmp_path, config)
    loaded = load_run(tmp_path)
    assert loaded is not None
    assert loaded.hash() == config.hash()


@pytest.mark.parametrize("content", [b"", b"{}x", b"\xff\xfe", b'{"run": 3}'])
def test_a_damaged_run_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(PierError, match=r"/run\.json[^$]*\nCopy run\.json from the --data folder of another site"):
        load_run(tmp_path)


def test_a_folder_has_one_daemon(tmp_path: Path) -> None:
    with claim(tmp_path), pytest.raises(PierError, match="another pier-node runs in"):
        claim(tmp_path)
    claim(tmp_path).close()


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "Free some space"), (errno.ENOTDIR, "Name a --data")])
def test_what_helps_against_an_unwritable_folder_is_said(tmp_path: Path, number: int, remedy: str) -> None:
    assert unwritable(tmp_path, OSError(number, os.strerror(number))).remedy.startswith(remedy)


def test_a_daemon_notices_that_its_folder_is_gone_even_if_another_is_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    with claim(folder) as lock:
        require_claimed(folder, lock)
        folder.rename(tmp_path / "moved")
        with pytest.raises(PierError, match="was deleted or moved"):
            require_claimed(folder, lock)
        (tmp_path / "moved").rename(folder)
        require_claimed(folder, lock)
        shutil.rmtree(folder)
        with claim(folder), pytest.raises(PierError, match="was deleted or moved"):
            require_claimed(folder, lock)
