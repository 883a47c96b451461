"""Does anything break when everything goes wrong at random?

    python -m bench.chaos [--sites N] [--seconds S] [--mean S] [--run NAME] [--overlap] [--only KIND] [--seed N]
                          [--keep FOLDER]

Sites are real `pier-node start` in network namespaces (as root, on Linux), with links of 100 Mbit/s and 10 ms, and
workers that train the smallest model, one round a second. At each site, faults of all kinds (chaos_faults.py) happen
at random times, `--mean` seconds apart on average, and may overlap: kills of all processes, of the daemon, of a
worker, freezes, polite stops, cuts, slow links, full disks, jumps of the clock. In the end all faults are healed. With
`--run witness`, the sites have a coordinator, which suffers the same; with `--run pipeline`, each holds half of the
blocks, and a round is an iteration, which is empty if a site is lost in it.

What must hold: no two sites ever committed different bits, or different token counts, after the same round; no site
ended on its own, or with a traceback, or left anything behind; afterwards all sites commit rounds together, with no
more open files, threads and memory than before. The exit code is 1 if anything does not hold. The longest time without
a round is reported.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import goodput_figures
from bench.chaos_faults import (
    KINDS,
    LEAVES_WITHIN,
    Kind,
    Line,
    Undo,
    Victim,
    by_its_own_clock,
    nothing,
    small_disk,
)
from bench.goodput_sites import ENDLESS, HOOK, PROGRAMS, Site, hooked, invited, start_commands
from bench.slow_links import Spot, refuse_without_tools, star
from bench.tiny_run import Keys, tiny_run
from pier_node.base.errors import PierError
from pier_node.rounds.folder import EVENTS_FILE, read_events

RUNS: dict[str, Keys] = {
    "diloco": {"algorithm": "diloco"},
    "pier": {"algorithm": "pier", "start_fraction": 1e-5},
    "sync": {"algorithm": "sync"},
    "codec": {"algorithm": "diloco", "codec": "int4", "fragments": 4, "overlap": True},
    "witness": {"algorithm": "diloco"},
    "noloco": {"algorithm": "noloco"},
    "pipeline": {"algorithm": "diloco"},
}
"""[outer] of the runs that can be chosen. The start of pier is over before the faults begin."""
INNER_STEPS, PACE = 8, 0.125
"""A round a second with up to eight sites. Few inner steps,
so that a machine with two cores has time for the restarts of many sites."""
RATE = 100.0
"""Mbit/s of a site's uplink."""
DISK = 64
"""Megabytes of a site's disk."""
WARM, TOGETHER = 8, 3
"""Rounds of all sites before faults begin, and after they have been healed."""
PATIENCE = 180.0
"""Seconds within which these come, with up to eight sites."""
LOOK = 0.1
WORK = "/var/tmp"
"""Where the sites' folders are: their /tmp is another."""
MORE_FILES, MORE_THREADS, MORE_BYTES = 16, 16, 64 << 20
"""What a daemon may hold more in the end than the largest before the faults."""
GONE_WITHIN = 60.0
"""Seconds in which all that is more has to go: connections end some time after a cut."""
ENDED = "it ended by itself"
BAD_SIGNS = ("Traceback", "never retrieved", "never awaited", "Unclosed", "was destroyed but it is pending")


@dataclass(frozen=True)
class Setting(goodput_figures.Setting):
    """A trial, which of RUNS it is of, and the names of its faults' kinds; none: all."""

    run: str
    only: tuple[str, ...] = ()

    @property
    def crowd(self) -> float:
        """How much longer all takes than with eight sites: the machine has so many cores."""
        return max(1.0, self.sites / 8)

    @property
    def kinds(self) -> list[Kind]:
        """The faults that are drawn from."""
        return [kind for kind in KINDS if not self.only or kind.name in self.only]

    @property
    def apart(self) -> bool:
        """Whether sites have states of their own, and rounds two members."""
        return self.run == "noloco"


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        faults: how many of each kind.
        rounds: committed while there were faults.
        longest: seconds without any commit, at most.
        back: seconds from the last fault's end until all sites committed a round together.
        problems: what must not be, in words.
    """

    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    longest: float = 0.0
    back: float = math.nan
    problems: list[str] = field(default_factory=list)


class Trial:
    """Sites under faults."""

    def __init__(self, setting: Setting, victims: Sequence[Victim], tick: Callable[[], None]) -> None:
        self._setting, self._victims, self._tick = setting, victims, tick
        self._sites = victims[: setting.sites]
        self._newest, self._since = 0, time.monotonic()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Wait for the sites, let it rain, and look at what is left."""
        self._together(WARM, "before any fault")
        before = [self._held(victim) for victim in self._victims]
        first, self._since = self._newest, time.monotonic()
        self._rain()
        self.outcome.rounds = self._newest - first
        began = time.monotonic()
        self._together(TOGETHER, "after all faults were healed")
        self.outcome.back = time.monotonic() - began
        self._check_growth(before)
        self._end()
        histories = {site.folder.name: events(site) for site in self._sites}
        self.outcome.problems += flaws(histories, self._setting.apart)
        return self.outcome

    def _rain(self) -> None:
        """Do each fault at its time, and undo it after a while."""
        setting, order = self._setting, itertools.count()
        due: list[tuple[float, int, Undo]] = []
        began = time.monotonic()
        for number, fault in enumerate(setting.faults(len(self._victims))):
            dice = random.Random(f"{setting.seed}/{number}")
            kind = dice.choice(setting.kinds)
            while due and due[0][0] <= fault.at:
                at, _, undo = heapq.heappop(due)
                self._supervise(began + at)
                undo()
            self._supervise(began + fault.at)
            self.outcome.faults[kind.name] += 1
            undo = kind.do(self._victims[fault.site], dice)
            heapq.heappush(due, (fault.at + dice.uniform(0.0, kind.longest), next(order), undo))
        while due:
            at, _, undo = heapq.heappop(due)
            self._supervise(began + at)
            undo()

    def _supervise(self, until: float) -> None:
        """Start again what has ended, as systemd would, and look at the rounds."""
        while True:
            for victim in self._victims:
                if victim.site.ended and not victim.away:
                    if not victim.excused:
                        victim.rude.append(ENDED)
                    victim.site.start()
            self._look()
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, LOOK))

    def _look(self) -> None:
        newest = max((event["round"] for site in self._sites for event in events(site)[-1:]), default=0)
        now = time.monotonic()
        self.outcome.longest = max(self.outcome.longest, now - self._since)
        if newest > self._newest:
            self._newest, self._since = newest, now
        self._tick()

    def _together(self, rounds: int, when: str) -> None:
        """Return when all sites have committed so many rounds with nobody missing. Raises RuntimeError."""
        longest, patience = self.outcome.longest, PATIENCE * self._setting.crowd
        deadline = time.monotonic() + patience
        seen = [len(events(site)) for site in self._sites]
        while not all(self._with_all(site, start) >= rounds for site, start in zip(self._sites, seen, strict=True)):
            if time.monotonic() > deadline:
                tails = "\n\n".join(victim.site.tail() for victim in self._victims)
                raise RuntimeError(f"the sites do not come together within {patience:.0f} s {when}:\n\n{tails}")
            self._supervise(time.monotonic() + LOOK)
        self.outcome.longest = longest

    def _with_all(self, victim: Victim, start: int) -> int:
        members = 2 if self._setting.apart else self._setting.sites
        return sum(len(event["members"]) == members for event in events(victim)[start:])

    def _held(self, victim: Victim) -> tuple[int, int, int]:
        """Open files, threads and bytes of memory of its daemon."""
        daemon = victim.site.family()[-1]
        return daemon.num_fds(), daemon.num_threads(), daemon.memory_info().rss

    def _check_growth(self, before: Sequence[tuple[int, int, int]]) -> None:
        most = [max(column) for column in zip(*before, strict=True)]
        limits = [it + more for it, more in zip(most, (MORE_FILES, MORE_THREADS, MORE_BYTES), strict=True)]
        deadline = time.monotonic() + GONE_WITHIN
        while (grown := self._grown(limits)) and time.monotonic() < deadline:
            self._supervise(time.monotonic() + LOOK)
        self.outcome.problems += grown

    def _grown(self, limits: Sequence[int]) -> list[str]:
        return [
            f"{victim.folder.name} holds {held} {what}; at most {limit} were right"
            for victim in self._victims
            for what, held, limit in zip(("open files", "threads", "bytes"), self._held(victim), limits, strict=True)
            if held > limit
        ]

    def _end(self) -> None:
        """Have all leave at once, and look at what they said and left."""
        for victim in self._victims:
            code = victim.site.leave(LEAVES_WITHIN)
            if code != 0:
                victim.rude.append(f"it left with exit code {code} in the end")
            said = victim.folder.with_suffix(".log").read_text(errors="replace")
            for sign in BAD_SIGNS:
                if found := re.search(f"{sign}.{{0,300}}", said, re.DOTALL):
                    victim.rude.append(f"it printed: {found[0]}")
            self.outcome.problems += [f"{victim.folder.name}: {what}" for what in victim.rude]


def flaws(histories: Mapping[str, Sequence[Mapping[str, Any]]], apart: bool) -> list[str]:
    """What must not be in what sites wrote down of their rounds, in words.

    Args:
        histories: events by site, in the order in which they were written.
        apart: the sites have states of their own, so that only each site's own rounds can be compared.
    """
    found, told = [], defaultdict[tuple[int, str], set[tuple[str, int]]](set)
    for name, history in histories.items():
        for event in history:
            told[event["round"], name if apart else ""].add((event["digest"], event["tokens_in_anchor"]))
        for before, after in pairwise(history):
            if (
                after["round"] > before["round"]
                and after["tokens_in_anchor"] < before["tokens_in_anchor"]
                and not apart
            ):
                found.append(f"{name} has lost tokens from round {before['round']} to {after['round']}")
    return found + [f"FORKED in round {number}: {states}" for (number, _), states in told.items() if len(states) > 1]


def events(victim: Victim) -> list[dict[str, Any]]:
    """What a site wrote down of each round that it committed."""
    path = victim.folder / EVENTS_FILE
    return [event for event in read_events(path.read_bytes() if path.exists() else b"") if event["round"]]


@dataclass(frozen=True)
class Temporary:
    """A /tmp and a /dev/shm that only the processes of a trial have, so that all in them was left by these.

    Attributes:
        folders: what lies there.
    """

    folders: tuple[Path, Path]

    def inside(self, spot: Spot) -> list[str]:
        """Words before a command that run it in the namespace of a spot, and with these."""
        mounts = 'mount --bind "$0" /tmp && mount --bind "$1" /dev/shm && shift && exec "$@"'
        return ["ip", "netns", "exec", spot.namespace, "sh", "-c", mounts, *map(str, self.folders)]

    def left(self) -> list[Path]:
        """What is there; libfaketime's files, which processes that are killed cannot remove, do not count."""
        found = (path for folder in self.folders for path in folder.iterdir())
        return sorted(path for path in found if "faketime" not in path.name)


@contextmanager
def running(work: Path, setting: Setting, temporary: Temporary) -> Iterator[list[Victim]]:
    """Sites of a run of their own, started, and last its coordinator if it is the witness; killed in the end."""
    witness = ["coordinator"] if setting.run == "witness" else []
    folders = [work / name for name in [*(f"site-{number}" for number in range(setting.sites)), *witness]]
    outer: Keys = {"overlap": setting.overlap, **RUNS[setting.run]}
    stages: Keys = {"stages": 2, "microbatches": 2} if setting.run == "pipeline" else {}
    run = tiny_run(
        setting.sites, ENDLESS, INNER_STEPS, outer, pipeline=stages, witness=bool(witness), text=topics.__file__
    )
    lines = [Line() for _ in folders]
    with ExitStack() as stack:
        spots = stack.enter_context(
            star([RATE] * len(folders), lambda here, there: max(lines[here].seconds, lines[there].seconds))
        )
        for folder in [*folders, *temporary.folders]:  # before any site, whose namespaces take them over
            stack.enter_context(small_disk(folder, DISK))
        addresses = [f"{spot.address}:7700" for spot in spots]
        last = list[Victim]()
        if witness:
            start = [str(PROGRAMS / "pier-coordinator"), "start", str(folders[-1]), "--listen", addresses[-1]]
            last = [_victim(temporary.inside(spots[-1]), lines[-1], folders[-1], start)]
            stack.callback(last[0].site.kill)
            commands = invited(last[0].site, run, folders[:-1], addresses[:-1], temporary.inside(spots[-1]))
        else:
            file = work / "run.toml"
            file.write_text(run)
            commands = start_commands(file, folders, addresses)
        victims = []
        for spot, line, folder, command in zip(spots, lines, folders, commands, strict=False):
            victims.append(_victim(temporary.inside(spot), line, folder, command, PACE * setting.crowd))
            stack.callback(victims[-1].site.kill)
            victims[-1].site.start()
        yield [*victims, *last]


def _victim(within: Sequence[str], line: Line, folder: Path, command: Sequence[str], pace: float = PACE) -> Victim:
    """A site, whose inner steps take `pace` seconds, or the coordinator, with a right clock; not started."""
    clock = folder.with_suffix(".clock")
    environment = {**hooked(HOOK, PIER_BENCH_PACE=pace, PIER_BENCH_WAITS=0), **by_its_own_clock(clock)}
    victim = Victim(Site([*within, *command], folder, environment), folder, clock, line)
    victim.set_clock(0.0)
    return victim


def measure(setting: Setting, tick: Callable[[], None] = nothing, keep: Path | None = None) -> Outcome:
    """One trial. Raises PierError: it cannot be done here; RuntimeError: the sites do not come together.

    Args:
        keep: folder for a copy of the sites' folders and logs.
    """
    refuse_without_tools()
    for path in (Path(__file__), PROGRAMS):
        if path.is_relative_to("/tmp"):
            raise PierError(f"the sites do not see {path}: they have a /tmp of their own", "Have it outside /tmp.")
    with tempfile.TemporaryDirectory(dir=WORK) as folder, ExitStack() as stack:
        temporary = Temporary((Path(folder, "tmp"), Path(folder, "shm")))
        victims = stack.enter_context(running(Path(folder), setting, temporary))
        if keep:
            unneeded = shutil.ignore_patterns("tmp", "shm")
            stack.callback(shutil.copytree, folder, keep, dirs_exist_ok=True, ignore=unneeded)
        found = Trial(setting, victims, tick).run()
        found.problems += [f"left behind: {path}" for path in temporary.left()]
    return found


def table(found: Outcome, setting: Setting) -> Table:
    """The faults, and what came of them."""
    title = f"{setting.sites} sites, {setting.run}{' with overlap' * setting.overlap}, {setting.seconds:g} s"
    shown = Table("", "", title=title, show_header=False)
    for kind, times in sorted(found.faults.items()):
        shown.add_row(kind, str(times))
    shown.add_section()
    shown.add_row("rounds committed meanwhile", str(found.rounds))
    shown.add_row("longest time without a round", f"{found.longest:.1f} s")
    shown.add_row(f"{TOGETHER} rounds of all, after the last fault", f"{found.back:.1f} s")
    shown.add_row("problems", str(len(found.problems)))
    return shown


@click.command()
@click.option("--sites", default=4, show_default=True, help="How many.")
@click.option("--seconds", default=120.0, show_default=True, help="Of faults.")
@click.option("--mean", default=15.0, show_default=True, help="Seconds between two faults of a site, on average.")
@click.option("--seed", default=1, show_default=True, help="Of the faults.")
@click.option("--run", type=click.Choice([*RUNS]), default="diloco", show_default=True, help="What the sites do.")
@click.option("--overlap/--no-overlap", default=False, show_default=True, help="outer.overlap of the run.")
@click.option(
    "--only", multiple=True, type=click.Choice([kind.name for kind in KINDS]), help="These faults; repeatable."
)
@click.option("--keep", type=click.Path(path_type=Path), help="Copy the sites' folders there.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(json_file: Path | None, keep: Path | None, **options: Any) -> None:
    """Let faults rain on a run."""
    setting, console = Setting(**options), Console()
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("faults", total=setting.seconds)
            began = time.monotonic()
            found = measure(setting, lambda: progress.update(task, completed=time.monotonic() - began), keep)
    except PierError as error:
        raise click.ClickException(f"{error.problem}\n{error.remedy}") from error
    console.print(table(found, setting))
    for problem in found.problems:
        console.print(problem, markup=False, style="red")
    if json_file:
        json_file.write_text(json.dumps({**vars(setting), **vars(found)}, indent=1) + "\n")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    cli()
