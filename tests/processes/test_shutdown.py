"""Ctrl+C: a daemon ends within seconds and leaves nothing behind, whatever it was doing."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from signal import SIGINT

import psutil
import pytest
from processes.run import Found
from processes.site import TEMPORARY, Site

pytestmark = [pytest.mark.processes, pytest.mark.alone]  # what others leave in /dev/shm would count

SHARED_MEMORY = Path("/dev/shm")


def belongings(site: Site) -> set[Path]:
    """Folders outside its data folder that its processes were told to use."""
    words = set[str]()
    for process in site.family():
        with suppress(psutil.Error):  # it has ended, or has just been forked
            words |= {*process.cmdline(), *process.environ().values()}
    return {Path(word).parent for word in words if word.startswith(f"{TEMPORARY}/pier-")}


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("moment", ["starting", "waiting", "training"])
def test_nothing_is_left(found: Found, moment: str) -> None:
    run = found(2 if moment == "waiting" else 1, inner={"total_steps": 100_000}, outer={"inner_steps": 1000})
    site, shared = run.sites[0], set(os.listdir(SHARED_MEMORY))
    site.start()
    site.wait("starts its workers", lambda: bool(belongings(site)))
    if moment != "starting":
        site.be(moment)
    family, folders = site.family(), belongings(site)
    assert listens(site.address)
    assert site.stop(SIGINT) == 0
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not listens(site.address)
    assert not (site.folder / "daemon.json").exists()
    assert not [folder for folder in folders if folder.exists()]
    assert set(os.listdir(SHARED_MEMORY)) <= shared
    assert "Leaving the run" in site.output
