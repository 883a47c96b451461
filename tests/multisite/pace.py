"""A site's machine that sleeps for a while, or is slower than it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
from processes.site import Site

PERIOD = 0.1
"""Seconds of work and rest together; short enough that nobody takes the rest for a death."""


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
