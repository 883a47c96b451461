"""The faults of bench/chaos.py: what is done to a site, and how it is undone."""

from __future__ import annotations

import math
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

import psutil

from bench.goodput_sites import Site

NEAR, SLOW = 0.01, 1.0
"""Seconds one way between two sites, and to or from a site whose line is slow."""
PACKAGES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
"""libfaketime (Debian: faketime), which makes clocks jump."""
DAY = 86400
LEAVES_WITHIN = 60.0
"""Seconds. A site whose peers do not answer takes up to 25 s, and then saves; this machine may be busy."""
FILE_BYTES = 1 << 16


@dataclass
class Line:
    """The way to the other sites; None is normal.

    Attributes:
        seconds: latency one way; inf: nothing arrives.
    """

    seconds: float = NEAR


@dataclass
class Victim:
    """A site that faults are done to.

    Attributes:
        folder: its data folder, on a file system of its own.
        clock: file that libfaketime reads.
        rude: what it did that no site should, in words.
        away: it has been told to leave, and is not to be started yet.
        excused_until: until then it may end by itself, because its disk is or was full; in time.monotonic's seconds.
    """

    site: Site
    folder: Path
    clock: Path
    line: Line = field(default_factory=Line)
    rude: list[str] = field(default_factory=list)
    away: bool = False
    excused_until: float = -math.inf

    @property
    def excused(self) -> bool:
        """Whether it may end by itself."""
        return time.monotonic() < self.excused_until

    def set_clock(self, offset: float) -> None:
        """Let its clock be wrong by so many seconds."""
        new = self.clock.with_suffix(".new")
        new.write_text(f"{offset:+.0f}")
        new.rename(self.clock)


Undo = Callable[[], None]


def nothing() -> None:
    """What is undone at once, or needs no undoing."""


def kill_all(victim: Victim, _dice: random.Random) -> Undo:
    """SIGKILL to daemon, launcher and workers; the same command at once."""
    victim.site.kill()
    victim.site.start()
    return nothing


def kill_daemon(victim: Victim, _dice: random.Random) -> Undo:
    """SIGKILL to the daemon alone; the same command at once, while its workers may still be ending."""
    for process in victim.site.family()[-1:]:
        process.kill()
    victim.site.kill()
    victim.site.start()
    return nothing


def kill_worker(victim: Victim, _dice: random.Random) -> Undo:
    """SIGKILL to a worker."""
    with suppress(psutil.NoSuchProcess):
        for process in victim.site.family():
            if process.name() == "pier-worker":
                process.kill()
    return nothing


def freeze(victim: Victim, _dice: random.Random) -> Undo:
    """SIGSTOP to all of its processes."""
    stopped = victim.site
    stopped.send(SIGSTOP)
    return lambda: stopped.send(SIGCONT)


def leave(victim: Victim, _dice: random.Random) -> Undo:
    """SIGTERM to the daemon, as for an upgrade."""
    victim.site.send(SIGCONT)  # a frozen one cannot leave
    victim.away, code = True, victim.site.leave(LEAVES_WITHIN)
    if code not in (0, -SIGTERM) and not victim.excused:  # -SIGTERM: Python was still starting
        victim.rude.append(f"it did not leave in {LEAVES_WITHIN:.0f} s, or failed: exit code {code}")
        victim.site.kill()

    def come_back() -> None:
        victim.away = False
        if victim.site.ended:
            victim.site.start()

    return come_back


def cut_off(victim: Victim, _dice: random.Random) -> Undo:
    """Nothing that it sends arrives, nor what is sent to it."""
    return _line(victim, math.inf)


def slow_line(victim: Victim, _dice: random.Random) -> Undo:
    """Its line takes a second each way."""
    return _line(victim, SLOW)


def _line(victim: Victim, seconds: float) -> Undo:
    victim.line.seconds = seconds

    def heal() -> None:
        victim.line.seconds = NEAR

    return heal


def clock_jump(victim: Victim, dice: random.Random) -> Undo:
    """Its clock jumps by up to a day, forwards or backwards, and back later."""
    victim.set_clock(dice.uniform(-DAY, DAY))
    return lambda: victim.set_clock(0.0)


def full_disk(victim: Victim, _dice: random.Random) -> Undo:
    """The disk of its data folder is full."""
    victim.excused_until, ballast = math.inf, victim.folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(FILE_BYTES)):
            pass

    def free() -> None:
        victim.excused_until = time.monotonic() + LEAVES_WITHIN
        ballast.unlink(missing_ok=True)

    return free


@dataclass(frozen=True)
class Kind:
    """A fault, and the longest time in seconds after which it is undone; 0: at once."""

    do: Callable[[Victim, random.Random], Undo]
    longest: float = 0.0

    @property
    def name(self) -> str:
        """In words."""
        return self.do.__name__.replace("_", " ")


KINDS = (
    Kind(kill_all),
    Kind(kill_daemon),
    Kind(kill_worker),
    Kind(freeze, 15.0),
    Kind(leave, 5.0),
    Kind(cut_off, 15.0),
    Kind(slow_line, 15.0),
    Kind(full_disk, 5.0),
    *([Kind(clock_jump, 10.0)] if PACKAGES else []),
)


def by_its_own_clock(clock: Path) -> dict[str, str]:
    """Environment of a site whose clock can jump; monotonic clocks do not, on a real machine either."""
    if not PACKAGES:
        return {}
    ways = {"TIMESTAMP_FILE": str(clock), "CACHE_DURATION": "1", "DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(PACKAGES[0]), **{f"FAKETIME_{key}": value for key, value in ways.items()}}


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A folder with a file system of its own, in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "pier-chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
