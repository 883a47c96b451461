"""How fast does the coordinator answer 1,000 sites?

    python -m bench.coordinator [--quick] [--json FILE]

Each simulated site has its own key and TLS connection, an open Watch stream, one heartbeat a second and a report of
three records each 10 s. The coordinator is a process of its own, with its database on the disk; all sites are in one
other process on the same machine. An answer's time is taken at the site: from the request to the answer, and whatever
either of the two processes has to do before. Sites were let in before (an address may enrol two a second); they
register 32 at once, which includes the TLS handshake, and is over before the rest is measured.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing as mp
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import click
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

from bench.coordinator_load import Answers, Member, load
from pier_coordinator.coordinator import Coordinator
from pier_coordinator.service import CoordinatorService
from pier_coordinator.store.rows import InviteRow
from pier_coordinator.store.store import LOG_NAME, Store
from pier_node.certificates import Credentials, credentials
from pier_node.config import RunConfig, RunSection
from pier_node.identity import Identity, Token

GOAL = 0.050
"""Seconds, p99 of an answer."""
HOUR = 3600


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
    """What was measured. Sizes are bytes; `cpu` are cores that the coordinator kept busy."""

    sites: int
    seconds: float
    methods: list[Latency]
    errors: list[str]
    memory: int
    cpu: float
    load_cpu: float
    database_an_hour: int
    log_an_hour: int


def serve(folder: Path, config: RunConfig, own: Credentials, nodes: list[str], told: Connection) -> None:
    """The coordinator's process: tells its port, and ends when it is told anything."""
    asyncio.run(_serve(folder, config, own, nodes, told))


async def _serve(folder: Path, config: RunConfig, own: Credentials, nodes: list[str], told: Connection) -> None:
    store = Store(folder / "run.db", lambda _: None)
    now = time.time()
    await store.add_invite(InviteRow("bench", None, now + HOUR, len(nodes), own.cert_pem, now))
    for number, node in enumerate(nodes):
        await store.enrol(node, f"lab-{number}", "bench", now)
    coordinator = Coordinator(store, config)
    await coordinator.begin()
    service = CoordinatorService(coordinator, own, lambda _: b"")
    told.send(await service.start("127.0.0.1", 0))
    watch = asyncio.create_task(coordinator.watch_over())
    await asyncio.to_thread(told.recv)
    watch.cancel()
    await service.stop()
    await store.close()


@dataclass
class Meter:
    """What the coordinator's process and files have used since the load began."""

    process: psutil.Process
    folder: Path
    begun: float = 0.0
    cpu: float = 0.0
    load_cpu: float = 0.0
    sizes: tuple[int, int] = field(default=(0, 0))

    def start(self) -> None:
        """Begin to count."""
        self.begun, self.cpu, self.load_cpu = time.perf_counter(), _cpu(self.process), _cpu(psutil.Process())
        self.sizes = self._sizes()

    def figures(self, sites: int, answers: Answers) -> Figures:
        """Since then."""
        seconds = time.perf_counter() - self.begun
        database, log = (
            round((now - then) * HOUR / seconds) for now, then in zip(self._sizes(), self.sizes, strict=True)
        )
        return Figures(
            sites,
            seconds,
            [Latency.of(method, taken) for method, taken in answers.seconds.items()],
            answers.errors,
            self.process.memory_info().rss,
            (_cpu(self.process) - self.cpu) / seconds,
            (_cpu(psutil.Process()) - self.load_cpu) / seconds,
            database,
            log,
        )

    def _sizes(self) -> tuple[int, int]:
        with closing(sqlite3.connect(self.folder / "run.db")) as database:  # a part of it is in its write-ahead log
            ((pages,), (page,)) = (
                database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
            )
        return pages * page, (self.folder / LOG_NAME).stat().st_size


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(sites: int, seconds: float) -> Figures:
    """One coordinator, so many sites, for so long."""
    config = RunConfig(run=RunSection(name="bench", sites=sites))
    token = Token.new(config.hash())
    identities = [Identity(ec.generate_private_key(ec.SECP256R1())) for _ in range(sites + 1)]
    own, *others = identities
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, (here, there) = Path(name), context.Pipe()
        nodes = [identity.node for identity in others]
        process = context.Process(target=serve, args=(folder, config, credentials(own, token), nodes, there))
        process.start()
        try:
            port, server = here.recv(), f"{own.node}.pier"
            members = [Member(each.node, credentials(each, token), port, server, config.hash()) for each in others]
            meter = Meter(psutil.Process(process.pid), folder)
            answers = asyncio.run(load(members, seconds, meter.start))
            figures = meter.figures(sites, answers)
            here.send("end")
            process.join(timeout=30)
            return figures
        finally:
            process.terminate()


def table(figures: Figures) -> Table:
    """The answer times, and below what they cost."""
    caption = (
        f"{len(figures.errors)} errors. Coordinator: {figures.cpu:.2f} cores, {figures.memory / 1e6:.0f} MB; "
        f"an hour of this: {figures.database_an_hour / 1e6:.0f} MB of database, {figures.log_an_hour / 1e6:.0f} MB "
        f"of event log. Load generator: {figures.load_cpu:.2f} cores."
    )
    shown = Table("method", title=f"{figures.sites} sites for {figures.seconds:.0f} s; answers in ms", caption=caption)
    for heading in ("answers", "p50", "p99", "slowest", f"p99 < {GOAL * 1e3:.0f} ms"):
        shown.add_column(heading, justify="right")
    for each in figures.methods:
        times = [f"{1e3 * seconds:.1f}" for seconds in (each.p50, each.p99, each.slowest)]
        met = "" if each.method == "Register" else "yes" if each.p99 < GOAL else "no"
        shown.add_row(each.method, str(each.calls), *times, met)
    return shown


@click.command()
@click.option("--quick", is_flag=True, help="100 sites for 10 s.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(quick: bool, json_file: Path | None) -> None:
    """Measure how fast the coordinator answers its sites."""
    console = Console()
    figures = measure(100, 10) if quick else measure(1000, 60)
    console.print(table(figures))
    for error in sorted(set(figures.errors))[:10]:
        console.print(error, markup=False)
    if json_file:
        methods = [vars(each) for each in figures.methods]
        json_file.write_text(json.dumps({**vars(figures), "methods": methods}, indent=1) + "\n")


if __name__ == "__main__":
    cli()
