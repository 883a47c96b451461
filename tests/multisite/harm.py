"""What befalls a site's machine: a disk that is full, memory that runs out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from processes.hosts import sh
from processes.site import wait_until

MEMORY = Path("/sys/fs/cgroup/memory")
LEAST = 6 << 20
"""Bytes; less than a worker needs besides what it shares with its launcher."""

memory_groups = pytest.mark.skipif(
    not (MEMORY / "memory.limit_in_bytes").exists(),
    reason="no memory controller of cgroups (version 1) here: workers that the kernel kills for memory are NOT tested",
)


class SmallDisk:
    """A disk of so many MiB for what a site keeps in this folder."""

    def __init__(self, folder: Path, mib: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        sh(f"mount -t tmpfs -o size={mib}m tmpfs {folder}")

    def fill(self) -> None:
        """Leave no room on it."""
        with (self._folder / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(1 << 16)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017

    def empty(self) -> None:
        """Make room again."""
        (self._folder / "filler").unlink()

    def close(self) -> None:
        """Take it away."""
        sh(f"umount -l {self._folder}")


@contextmanager
def short_of_memory(process: psutil.Process) -> Iterator[None]:
    """What it starts meanwhile gets next to no memory. Ends once the kernel has killed something of that."""
    group = MEMORY / f"pier-{process.pid}"
    group.mkdir()
    limit, members = group / "memory.limit_in_bytes", group / "cgroup.procs"
    try:
        limit.write_text(str(LEAST))
        members.write_text(str(process.pid))
        yield
        wait_until("the kernel kills", lambda: "oom_kill 0" not in (group / "memory.oom_control").read_text())
    finally:
        limit.write_text("-1")
        for pid in members.read_text().split():
            with suppress(OSError):
                (MEMORY / "cgroup.procs").write_text(pid)
        wait_until("nobody is in the group", lambda: not members.read_text())
        group.rmdir()
