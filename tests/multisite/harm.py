"""What befalls a site's machine: it sleeps, or is slow; its disk is full, its memory runs out; its line is bad."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from processes.hosts import WIRE_BRIDGE, Host, sh
from processes.site import Site, wait_until

from bench.delay_line import TAP_DEVICE, TUN, Line, device, joined

PERIOD = 0.1
"""Seconds of work and rest together; short enough that nobody takes the rest for a death."""
MEMORY = Path("/sys/fs/cgroup/memory")
LEAST = 6 << 20
"""Bytes; less than a worker needs besides what it shares with its launcher."""

memory_groups = pytest.mark.skipif(
    not (MEMORY / "memory.limit_in_bytes").exists(),
    reason="no memory controller of cgroups (version 1) here: workers that the kernel kills for memory are NOT tested",
)
taps = pytest.mark.skipif(not os.path.exists(TUN), reason=f"no {TUN} here: lines with latency and loss are NOT tested")


@contextmanager
def asleep(site: Site) -> Iterator[None]:
    """None of its processes does anything meanwhile; what is sent to it waits in the kernel."""
    with _held([site.daemon, *site.family()]):
        yield


@contextmanager
def slowed(site: Site, share: float) -> Iterator[None]:
    """Its processes work for so much of the time meanwhile, and rest for the remainder."""
    processes, over = [site.daemon, *site.family()], threading.Event()

    def work_and_rest() -> None:
        while not over.wait(share * PERIOD):
            with _held(processes):
                over.wait((1 - share) * PERIOD)

    thread = threading.Thread(target=work_and_rest, name=f"slows {site.name}")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _held(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


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


@contextmanager
def rough(host: Host, line: Line) -> Iterator[None]:
    """Have a host behind a line with latency and loss meanwhile: by a detour from its port to the bridge of all."""
    near, far, detour = (f"{name}{host.port}" for name in ("near", "far", "detour"))
    with ExitStack() as stack:
        files = [stack.enter_context(_tap(host.wire, name)) for name in (near, far)]
        sh(f"ip -n {host.wire} link add {detour} type bridge")
        stack.callback(sh, f"ip -n {host.wire} link del {detour}")
        sh(f"ip -n {host.wire} link set {detour} up")
        sh(f"ip -n {host.wire} link set {near} master {detour}")
        sh(f"ip -n {host.wire} link set {far} master {WIRE_BRIDGE}")
        sh(f"ip -n {host.wire} link set {host.port} master {detour}")
        stack.callback(sh, f"ip -n {host.wire} link set {host.port} master {WIRE_BRIDGE}")
        stack.enter_context(joined(files, line))
        yield


@contextmanager
def _tap(namespace: str, name: str) -> Iterator[int]:
    with device(name, TAP_DEVICE) as file:
        sh(f"ip link set {name} netns {namespace}")
        sh(f"ip -n {namespace} link set {name} txqueuelen 10000 up")
        yield file
