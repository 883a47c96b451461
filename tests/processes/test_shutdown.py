"""Ctrl+C: a daemon ends within seconds and leaves nothing behind, whatever it was doing."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from signal import SIGINT

import psutil
import pytest
from processes.conftest import Found
from processes.site import Site

pytestmark = pytest.mark.processes

TEMPORARY, SHARED_MEMORY = Path(tempfile.gettempdir()), Path("/dev/shm")


def belongings(site: Site) -> set[Path]:
    """Folders outside its data folder that its processes were told to use."""
    words = [word for process in site.family() for word in process.cmdline() if word.startswith(f"{TEMPORARY}/pier-")]
    return {Path(word).parent for word in words}


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
        site.wait("is at work", lambda: site.status().get("phase") == moment)
    family, folders = site.family(), belongings(site)
    assert listens(site.address)
    site.send(SIGINT)
    assert site.ended(10.0) == 0
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not listens(site.address)
    assert not (site.folder / "daemon.json").exists()
    assert not [folder for folder in folders if folder.exists()]
    assert set(os.listdir(SHARED_MEMORY)) <= shared
    assert "Leaving the run" in site.output


def test_a_finished_run_starts_and_ends_at_once(found: Found) -> None:
    run = found(1, inner={"total_steps": 20})
    run.start()
    run.finish()
    events = run.sites[0].events()
    run.start()
    run.finish()
    assert run.sites[0].events() == events
    assert run.sites[0].output.count("The run is finished") == 2
