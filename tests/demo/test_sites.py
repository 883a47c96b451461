from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from pier_node.base.errors import PierError
from pier_node.demo.sites import NAMES, Site, Sites
from pier_node.rounds.folder import DAEMON_FILE


def test_sites_have_names_and_folders_of_their_own(tmp_path: Path) -> None:
    sites = Sites(tmp_path, 8, threads=1).all
    assert [site.name for site in sites] == list(NAMES)
    assert len({path for site in sites for path in (site.folder, site.log)}) == 16
    assert not any(site.started or site.running for site in sites)


async def test_stopping_what_was_never_started(tmp_path: Path) -> None:
    sites = Sites(tmp_path, 3, threads=1)
    await sites.stop()
    assert [site.code for site in sites.all] == [None] * 3


async def test_a_site_that_cannot_start_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path, "alpha", threads=1)
    await site.start("--run", str(tmp_path / "missing.toml"))
    assert site.started
    await site.ended()
    assert (site.code, site.running) == (1, False)
    assert "missing.toml: No such file or directory" in site.tail()


async def test_stop_ends_a_site_that_is_starting(tmp_path: Path) -> None:
    sites, before = Sites(tmp_path, 2, threads=1), psutil.Process().children(recursive=True)
    (tmp_path / "run.toml").write_text("")
    await sites.start(tmp_path / "run.toml")
    assert sites.all[0].running
    await sites.stop()
    assert not any(program.running for program in [*sites.all, sites.coordinator])
    assert set(psutil.Process().children(recursive=True)) <= set(before)


async def test_a_coordinator_that_cannot_start_says_why(tmp_path: Path) -> None:
    sites = Sites(tmp_path, 2, threads=1)
    (tmp_path / "run.toml").write_text("not = toml =")
    with pytest.raises(PierError, match=r"(?s)the coordinator does not run; .*coordinator\.log ends with:.*run\.toml"):
        await sites.start(tmp_path / "run.toml")
    assert not any(site.started for site in sites.all)


async def test_a_daemon_json_of_another_daemon_is_an_old_one(tmp_path: Path) -> None:
    site = Site(tmp_path, "alpha", threads=1)
    site.folder.mkdir()
    (site.folder / DAEMON_FILE).write_text(json.dumps({"pid": 1, "http": "http://127.0.0.1:1"}))
    assert site.http() is None
    await site.start("--run", str(tmp_path / "missing.toml"))
    assert site.http() is None
    await site.ended()


@pytest.mark.parametrize(("lines", "last"), [(3, "line 2"), (100, "line 99")])
def test_the_end_of_a_log(tmp_path: Path, lines: int, last: str) -> None:
    site = Site(tmp_path, "alpha", threads=1)
    assert site.tail() == ""
    site.log.write_text("".join(f"line {number}   \n" for number in range(lines)))
    assert site.tail().splitlines()[-1] == last
    assert len(site.tail().splitlines()) == min(lines, 15)
