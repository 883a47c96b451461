"""How fast does the coordinator answer 1,000 sites?

    python -m bench.coordinator [--quick] [--sites N] [--json FILE]

Each simulated site has its own key and TLS connection, an open Watch stream, one heartbeat a second and a report of
three records each 10 s. The page is open in one browser, and Prometheus collects the metrics every 15 s. The
coordinator is `pier-coordinator start`, its page included, in a process of its own; all sites are in one other process
on the same machine. Response times are measured at the site, from request to answer, including whatever else delays
the two processes. Sites have already enrolled (an address may enrol two a second); they register 32 at once, which
includes the TLS handshake, and this is over before the rest is measured. The run has lasted for a while: the database
is so full that it is compacted in the minute measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing as mp
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

from bench.coordinator_load import Answers, Member, load
from pier_coordinator.commands.start import Settings, run_coordinator
from pier_coordinator.identity.home import DAEMON_FILE, RUN_FILE, Home
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.sites import InviteRow, add_invite, enrol
from pier_coordinator.store.store import LOG_NAME, Store
from pier_node.base.address import parse_address
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity

GOAL = 0.050
"""Seconds, p99 of an answer."""
HOUR = 3600
FULL = 62 << 20
"""Bytes in the database at the beginning: a little less than what makes the coordinator compact it."""


@dataclass(frozen=True)
class Latency:
    """Answer times of a method, in seconds."""

    method: str
    calls: int
    p50: float
    p99: float
    slowest: float

    @classmethod
    def of(cls, method: str, seconds: list[float]) -> Latency:
        """Of all its answers."""
        ordered = sorted(seconds)
        p50, p99 = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
        return cls(method, len(ordered), p50, p99, ordered[-1])


@dataclass(frozen=True)
class Figures:
    """What was measured. Sizes are bytes; `cpu` are cores that the coordinator kept busy.

    Attributes:
        start_seconds: until the coordinator answered, with what the database had then.
        database, log: sizes at the end, that of the database with its write-ahead log.
    """

    sites: int
    seconds: float
    methods: list[Latency]
    errors: list[str]
    memory: int
    cpu: float
    load_cpu: float
    start_seconds: float
    database: int
    log: int


async def let_in(home: Home, nodes: list[str]) -> None:
    """Make the database, with these sites in it."""
    store = Store(home.database, lambda _: None)
    now = time.time()
    await store.do(add_invite, InviteRow("bench", None, now + HOUR, len(nodes), home.credentials().cert_pem, now))
    for number, node in enumerate(nodes):
        await store.do(enrol, node, f"lab-{number}", "bench", now)
    await store.close()


async def fill(home: Home, nodes: list[str], size: int) -> None:
    """Store what the sites have told before, until the database is so large."""
    store, rounds = Store(home.database, lambda _: None), itertools.count(1)
    while store.used_bytes() < size:
        for round in itertools.islice(rounds, 1 + 2000 // len(nodes)):
            await store.add_facts(_facts(nodes, round, time.time()))
        await store.tidy()
    await store.close()


def _facts(nodes: list[str], round: int, now: float) -> Iterator[Fact]:
    """What sites have told in a past round of ten seconds."""
    for node in nodes:
        when, done = now - HOUR + 10 * round, {"inner_step": 50 * round, "tokens": 10**6 * round, "loss": 2.5}
        yield Fact(when, "sample", node, {**done, "tokens_per_second": 12345.6, "utilisation": 0.9, "memory": 10**9})
        yield Fact(when, "round", node, {"round": round, "members": [node], "compute": 9.0, "exchange": 0.5})
        yield Fact(when, "link", node, {"peer": nodes[round % len(nodes)], "round_trip": 0.05, "bandwidth": 5e6})


def serve(folder: Path) -> None:
    """The coordinator's process."""
    run_coordinator(Settings(Home(folder), "127.0.0.1:0", None, "127.0.0.1:0"), quiet=True)


class Started(NamedTuple):
    """A coordinator: its process, its port, the URL of its page, and how long its start took, in seconds."""

    process: int
    port: int
    page: str
    seconds: float


@contextmanager
def coordinator(home: Home) -> Iterator[Started]:
    """`pier-coordinator start` in a process of its own."""
    begun = time.perf_counter()
    process = mp.get_context("spawn").Process(target=serve, args=(home.folder,))
    process.start()
    assert process.pid is not None
    announced = home.folder / DAEMON_FILE
    try:
        while not announced.exists():
            if process.exitcode is not None:
                raise RuntimeError("the coordinator ended")
            time.sleep(0.05)
        found = json.loads(announced.read_text())
        seconds = time.perf_counter() - begun
        yield Started(process.pid, parse_address(found["address"])[1], found["http"], seconds)
    finally:
        process.terminate()
        process.join()


@dataclass
class Meter:
    """What the coordinator's process and files have used since the load began."""

    process: psutil.Process
    home: Home
    start_seconds: float
    begun: float = 0.0
    cpu: float = 0.0
    load_cpu: float = 0.0

    def start(self) -> None:
        """Begin to count."""
        self.begun, self.cpu, self.load_cpu = time.perf_counter(), _cpu(self.process), _cpu(psutil.Process())

    def figures(self, sites: int, answers: Answers) -> Figures:
        """Since then."""
        seconds = time.perf_counter() - self.begun
        return Figures(
            sites,
            seconds,
            [Latency.of(method, taken) for method, taken in answers.seconds.items()],
            answers.errors,
            self.process.memory_info().rss,
            (_cpu(self.process) - self.cpu) / seconds,
            (_cpu(psutil.Process()) - self.load_cpu) / seconds,
            self.start_seconds,
            sum(file.stat().st_size for file in self.home.folder.glob(f"{self.home.database.name}*")),
            (self.home.folder / LOG_NAME).stat().st_size,
        )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(sites: int, seconds: float, full: int = FULL) -> Figures:
    """One coordinator, so many sites, for so long; the database has `full` bytes before."""
    identities = [Identity(ec.generate_private_key(ec.SECP256R1())) for _ in range(sites)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / RUN_FILE).write_text(f'[run]\nname = "bench"\nsites = {sites}\n')
        home = Home.found(Path(folder))
        nodes = [identity.node for identity in identities]
        asyncio.run(let_in(home, nodes))
        asyncio.run(fill(home, nodes, full))
        with coordinator(home) as it:
            name, run_hash = home.identity.node, home.config.hash()
            own = [(each.node, credentials(each, home.token)) for each in identities]
            members = [Member(*each, it.port, name, run_hash) for each in own]
            meter = Meter(psutil.Process(it.process), home, it.seconds)
            return meter.figures(sites, asyncio.run(load(members, it.page, seconds, meter.start)))


def table(figures: Figures) -> Table:
    """The answer times, and below what they cost."""
    caption = (
        f"{len(figures.errors)} errors. Coordinator: {figures.cpu:.2f} cores, {figures.memory / 1e6:.0f} MB, ready "
        f"after {figures.start_seconds:.1f} s; at the end {figures.database / 1e6:.0f} MB of database and "
        f"{figures.log / 1e6:.0f} MB of event log. Load generator: {figures.load_cpu:.2f} cores."
    )
    shown = Table("method", title=f"{figures.sites} sites for {figures.seconds:.0f} s; answers in ms", caption=caption)
    for heading in ("answers", "p50", "p99", "slowest", f"p99 < {GOAL * 1e3:.0f} ms"):
        shown.add_column(heading, justify="right")
    for each in figures.methods:
        times = [f"{1e3 * seconds:.1f}" for seconds in (each.p50, each.p99, each.slowest)]
        met = "" if each.method not in ("Heartbeat", "Report") else "yes" if each.p99 < GOAL else "no"
        shown.add_row(each.method, str(each.calls), *times, met)
    return shown


@click.command()
@click.option("--quick", is_flag=True, help="100 sites for 10 s.")
@click.option("--sites", type=click.IntRange(1, 1024), default=1000, show_default=True, help="How many, for 60 s.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(quick: bool, sites: int, json_file: Path | None) -> None:
    """Measure how fast the coordinator answers its sites."""
    console = Console()
    figures = measure(100, 10) if quick else measure(sites, 60)
    console.print(table(figures))
    for error in sorted(set(figures.errors))[:10]:
        console.print(error, markup=False)
    if json_file:
        methods = [vars(each) for each in figures.methods]
        json_file.write_text(json.dumps({**vars(figures), "methods": methods}, indent=1) + "\n")


if __name__ == "__main__":
    cli()
