"""Every test gets runs of its own, which end with it; when it fails, the ends of their logs are shown."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes.run import Found, Run
from processes.site import TEMPORARY

from pier_node.wire.transport import Transport


def is_deserted(home: Path) -> bool:
    """Whether a killed daemon left this folder behind: nobody listens at the socket in it."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(home / "socket")) == errno.ECONNREFUSED


@pytest.fixture
def found(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Found]:
    """Makes a run: `found(sites, inner={...}, outer={...})`."""
    runs: list[Run] = []

    def make(sites: int, twin: Run | None = None, transport: Transport = "grpc", **tables: dict[str, object]) -> Run:
        run = Run(tmp_path / f"run{len(runs)}", sites, twin, transport, **tables)
        runs.append(run)
        return run

    failures, homes = request.session.testsfailed, set(TEMPORARY.glob("pier-*"))
    yield make
    for run in runs:
        for site in run.sites:
            site.kill()
    for home in {*TEMPORARY.glob("pier-*")} - homes:
        if is_deserted(home):
            shutil.rmtree(home)
    if request.session.testsfailed > failures:
        print("\n".join(site.tail() for run in runs for site in run.sites))
    for run in runs:
        run.check()
