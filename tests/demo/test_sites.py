from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pier_node.base.errors import PierError
from pier_node.demo.sites import MARK, NAMES, WORKER, Site, Sites, claimed, output, started, throttle
from pier_node.rounds.folder import DAEMON_FILE
from pier_node.trainer import worker as worker_module


def test_sites_have_names_and_folders_of_their_own(tmp_path: Path) -> None:
    sites = Sites(tmp_path, 8).all
    assert [site.name for site in sites] == list(NAMES)
    assert len({path for site in sites for path in (site.folder, site.log)}) == 16
    assert not any(site.running for site in sites)


async def test_stopping_what_was_never_started(tmp_path: Path) -> None:
    sites = Sites(tmp_path, 3)
    await sites.stop()
    assert [site.code for site in sites.all] == [None] * 3


async def test_a_site_that_cannot_start_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path, "alpha")
    await site.start("--run", str(tmp_path / "missing.toml"))
    assert site.running
    await site.ended()
    assert (site.code, site.running) == (1, False)
    assert "missing.toml: No such file or directory" in site.tail()


async def test_stop_ends_a_site_that_is_starting(tmp_path: Path) -> None:
    sites, before = Sites(tmp_path, 2), psutil.Process().children(recursive=True)
    (tmp_path / "run.toml").write_text("")
    await sites.start(tmp_path / "run.toml")
    assert sites.all[0].running
    await sites.stop()
    assert not any(program.running for program in [*sites.all, sites.coordinator])
    assert set(psutil.Process().children(recursive=True)) <= set(before)


async def test_a_coordinator_that_cannot_start_says_why(tmp_path: Path) -> None:
    sites = Sites(tmp_path, 2)
    (tmp_path / "run.toml").write_text("not = toml =")
    with pytest.raises(PierError, match=r"(?s)the coordinator does not run; .*coordinator\.log ends with:.*run\.toml"):
        await sites.start(tmp_path / "run.toml")
    assert [site.code for site in sites.all] == [None, None]


async def test_a_daemon_json_of_another_daemon_is_an_old_one(tmp_path: Path) -> None:
    site = Site(tmp_path, "alpha")
    site.folder.mkdir()
    (site.folder / DAEMON_FILE).write_text(json.dumps({"pid": 1, "http": "http://127.0.0.1:1"}))
    assert site.http() is None
    await site.start("--run", str(tmp_path / "missing.toml"))
    assert site.http() is None
    await site.ended()


@pytest.mark.parametrize(("lines", "last"), [(3, "line 2"), (100, "line 99")])
def test_the_end_of_a_log(tmp_path: Path, lines: int, last: str) -> None:
    site = Site(tmp_path, "alpha")
    assert site.tail() == ""
    site.log.write_text("".join(f"line {number}   \n" for number in range(lines)))
    assert site.tail().splitlines()[-1] == last
    assert len(site.tail().splitlines()) == min(lines, 15)


async def test_what_a_command_prints() -> None:
    assert "pier-node" in await output("pier-node", "--version")


async def test_what_goes_wrong_is_told_in_the_commands_own_words() -> None:
    with pytest.raises(PierError, match=r"pier-coordinator invite: .*/nowhere"):
        await output("pier-coordinator", "invite", "--data", "/nowhere")


async def test_it_ends_with_whoever_waits_for_it() -> None:
    with pytest.raises(ZeroDivisionError):
        async with started("pier-node", "--version") as running:
            raise ZeroDivisionError
    assert running.returncode is not None


BUSY = "from pier_node.base.processes import call_process; call_process('{}'); print(flush=True)\nwhile True: pass"


class Family:
    """A program and what it has started."""

    def __init__(self, *processes: subprocess.Popen[bytes]) -> None:
        self._family = [psutil.Process(process.pid) for process in processes]

    def family(self) -> list[psutil.Process]:
        return self._family


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A worker, and another process."""
    names = (WORKER, "other")
    made = [subprocess.Popen([sys.executable, "-c", BUSY.format(name)], stdout=subprocess.PIPE) for name in names]
    for process in made:
        assert process.stdout
        process.stdout.readline()
    yield made
    for process in made:
        process.kill()
        process.communicate()


def test_workers_are_called_so() -> None:
    assert worker_module.WORKER == WORKER


async def test_workers_are_stopped_now_and_then_and_nobody_else(processes: list[subprocess.Popen[bytes]]) -> None:
    worker, other = (psutil.Process(process.pid) for process in processes)
    seen: set[tuple[str, bool]] = set()
    slow = asyncio.create_task(throttle(Family(*processes), 0.5))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while not {("worker", True), ("worker", False)} <= seen:
            await asyncio.sleep(0.02)
            seen |= {("worker", worker.status() == psutil.STATUS_STOPPED)}
            seen |= {("other", other.status() == psutil.STATUS_STOPPED)}
    slow.cancel()
    await asyncio.wait([slow])
    assert worker.status() != psutil.STATUS_STOPPED
    assert ("other", True) not in seen


async def test_a_worker_that_is_gone_is_no_error(processes: list[subprocess.Popen[bytes]]) -> None:
    slow = asyncio.create_task(throttle(Family(*processes), 0.5))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    processes[0].kill()
    processes[0].wait()
    done, _ = await asyncio.wait([slow], timeout=0.5)
    assert not done
    slow.cancel()
    await asyncio.wait([slow])


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "demo") as work:
        assert work == tmp_path / "a" / "demo"
        assert [path.name for path in work.iterdir()] == [MARK]
        assert work.stat().st_mode & 0o077 == 0  # it will hold keys and a token


def test_the_last_demo_goes_unless_it_is_kept(tmp_path: Path) -> None:
    with claimed(tmp_path, keep=False) as work:
        (work / "alpha" / "deep").mkdir(parents=True)
        (work / "alpha.log").write_text("old")
    with claimed(tmp_path, keep=True) as work:
        assert (work / "alpha.log").exists()
    with claimed(tmp_path, keep=False) as work:
        assert [path.name for path in work.iterdir()] == [MARK]


def test_what_a_link_points_to_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years of work")
    with claimed(tmp_path / "demo", keep=False) as work:
        (work / "link").symlink_to(precious)
    with claimed(tmp_path / "demo", keep=False) as work:
        assert not (work / "link").is_symlink()
    assert (precious / "thesis").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_other_folders_are_not_touched(tmp_path: Path, keep: bool) -> None:
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(PierError, match="holds something else than a demo"), claimed(tmp_path, keep):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_one_demo_at_a_time(tmp_path: Path) -> None:
    with claimed(tmp_path, keep=False) as work:
        (work / "alpha.log").write_text("now")
        with pytest.raises(PierError, match="another demo is at work"), claimed(tmp_path, keep=False):
            pass
        assert (work / "alpha.log").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PierError, match="cannot work there"), claimed(tmp_path / "file", keep=False):
        pass


def test_errors_of_the_demo_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), claimed(tmp_path, keep=False) as work:
        (work / "missing").read_text()
