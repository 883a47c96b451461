"""What does the coordinator keep of a day of 1,000 sites?

    python -m bench.coordinator_day [--sites N] [--hours H] [--json FILE]

Time is virtual: a day takes about a quarter of an hour. Sites call the coordinator's methods without a network, once a
minute: a heartbeat, and a report of six samples, a round and a link, as from a site of a `noloco` run with a round a
minute. Database, event log, compaction and read model are those of `pier-coordinator start`; the page asks once a
minute for what has changed. Compaction runs in real time, while data arrives about a hundred times as fast as usual,
so the database is larger here than it would be. At the end the coordinator is restarted from what is on disk.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

from bench.coordinator import let_in
from pier_coordinator.identity.home import RUN_FILE, Home
from pier_coordinator.runs.compaction import Compaction
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.service.reception import Reception
from pier_coordinator.store.store import Store
from pier_node.base.tasks import cancel_and_wait
from pier_node.identity.node import Identity
from pier_node.wire.carrier import PROTOCOL
from pier_proto.v1.coordinator_pb2 import (
    HeartbeatRequest,
    LinkRecord,
    Record,
    RegisterRequest,
    ReportRequest,
    RoundRecord,
    Sample,
)
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

MINUTE = 60.0
SAMPLES = 6
AT_ONCE = 50
"""Sites that call at the same time."""


@dataclass(frozen=True)
class Hour:
    """What there is after an hour of the run; sizes in bytes."""

    hour: int
    facts: int
    memory: int
    descriptors: int
    database: int
    log: int


@dataclass(frozen=True)
class Day:
    """The hours, and the start afterwards: its seconds, the hours that the loss curve covers, and its points."""

    sites: int
    seconds: float
    hours: list[Hour]
    start_seconds: float
    curve_hours: float
    points: int
    same_totals: bool


class VirtualSite:
    """A site of the run, called `node`."""

    def __init__(self, node: str, partner: str, reception: Reception) -> None:
        self._node, self._partner, self._reception = node, partner, reception
        self._lease = b""
        self._sent = 0

    async def register(self, run_hash: bytes, now: float) -> None:
        """Begin a lease."""
        request = RegisterRequest(protocol=PROTOCOL, run_hash=run_hash, site=self._site(), time=now)
        request.transport, request.version = "grpc", "bench"
        self._lease = (await self._reception.register(self._node, request)).lease

    async def minute(self, number: int, now: float) -> None:
        """Say what has happened in a minute of the run, which ends now."""
        step, tokens, loss = 50 * number, 10**6 * number, 2.5 + 5.0 / number
        pulse = Pulse(site=self._site(), phase=Phase.PHASE_TRAINING, round=number, inner_step=step, tokens=tokens)
        await self._reception.heartbeat(self._node, HeartbeatRequest(lease=self._lease, pulse=pulse, order=1))
        sample = Sample(inner_step=step, tokens=tokens, tokens_per_second=12345.6, loss=loss, memory=10**9)
        records = list(self._records(number, now, sample))
        first, self._sent = self._sent, self._sent + len(records)
        request = ReportRequest(lease=self._lease, stream=b"bench", first=first, records=records)
        await self._reception.report(self._node, request)

    def _records(self, number: int, now: float, sample: Sample) -> Iterator[Record]:
        for part in range(SAMPLES):
            yield Record(time=now - MINUTE * (1 - part / SAMPLES), sample=sample)
        members = [self._node, self._partner]
        done = RoundRecord(round=number, digest=bytes(32), members=members, compute=55.0, waiting=1.0, exchange=4.0)
        yield Record(time=now, round=done)
        yield Record(time=now, link=LinkRecord(peer=self._partner, round_trip=0.05, bandwidth=5e6))

    def _site(self) -> Site:
        return Site(node=self._node, address="10.0.0.1:7700")


class Run:
    """A coordinator in this process; `now` is the time of the run, in seconds since the epoch."""

    def __init__(self, home: Home) -> None:
        self.home, self.now = home, time.time()
        self.board = ReadModel(lambda: self.now, home.config)
        self.compaction = Compaction(self.board)
        self.store = Store(home.database, self.compaction.told)
        self.compaction.restore(self.store)
        self.coordinator = Coordinator(self.store, home.config, wall=lambda: self.now)

    async def pass_time(self, nodes: list[str], hours: int) -> list[Hour]:
        """Let so many hours pass."""
        await self.coordinator.begin()
        reception = Reception(self.coordinator, self.home.credentials(), self.home.identity.node, self.home.authority)
        sites = [VirtualSite(node, nodes[at - 1], reception) for at, node in enumerate(nodes)]
        for site in sites:
            await site.register(self.coordinator.run_hash, self.now)
        background = [
            asyncio.create_task(self.coordinator.watch_over()),
            asyncio.create_task(self.compaction.keep_small(self.store)),
        ]
        try:
            return [await self._hour(sites, hour) for hour in range(1, hours + 1)]
        finally:
            for task in background:
                await cancel_and_wait(task)

    async def _hour(self, sites: list[VirtualSite], hour: int) -> Hour:
        stamp = self.board.stamp
        for number in range(60 * (hour - 1) + 1, 60 * hour + 1):
            self.now += MINUTE
            for at in range(0, len(sites), AT_ONCE):
                await asyncio.gather(*(site.minute(number, self.now) for site in sites[at : at + AT_ONCE]))
            stamp = self.board.changes(stamp)["stamp"]
        process = psutil.Process()
        files = {file.name: file.stat().st_size for file in self.home.folder.iterdir()}
        return Hour(
            hour,
            hour * 60 * len(sites) * (SAMPLES + 2),
            process.memory_info().rss,
            process.num_fds(),
            sum(size for name, size in files.items() if name.startswith(self.home.database.name)),
            sum(size for name, size in files.items() if name.startswith("events")),
        )


async def day(home: Home, sites: int, hours: int) -> Day:
    """Let a run pass, then start its coordinator again."""
    nodes = [Identity(ec.generate_private_key(ec.SECP256R1())).node for _ in range(sites)]
    await let_in(home, nodes)
    begun, run = time.perf_counter(), Run(home)
    passed = await run.pass_time(nodes, hours)
    seconds = time.perf_counter() - begun
    await run.store.close()
    begun, again = time.perf_counter(), Run(home)
    start_seconds = time.perf_counter() - begun
    curve, totals = again.board.curves["loss"].points()["x"], (run.board.totals(), again.board.totals())
    await again.store.close()
    keys = ("round", "tokens", "inner_step", "bytes_sent")
    same = all(totals[0][key] == totals[1][key] for key in keys)
    return Day(sites, seconds, passed, start_seconds, (curve[-1] - curve[0]) / 3600, len(curve), same)


def table(found: Day) -> Table:
    """The hours, and the start below."""
    totals = "the same" if found.same_totals else "OTHER"
    caption = (
        f"It took {found.seconds:.0f} s. The start afterwards took {found.start_seconds:.1f} s: a loss curve of "
        f"{found.curve_hours:.1f} h in {found.points} points, {totals} totals."
    )
    shown = Table("hour", title=f"{found.sites} sites in virtual time", caption=caption)
    for heading in ("records so far", "memory, MB", "descriptors", "database, MB", "event log, MB"):
        shown.add_column(heading, justify="right")
    for each in found.hours:
        sizes = [f"{size / 1e6:.0f}" for size in (each.memory, each.database, each.log)]
        shown.add_row(str(each.hour), f"{each.facts:,}", sizes[0], str(each.descriptors), *sizes[1:])
    return shown


@click.command()
@click.option("--sites", type=click.IntRange(2, 1024), default=1000, show_default=True)
@click.option("--hours", type=click.IntRange(1), default=24, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(sites: int, hours: int, json_file: Path | None) -> None:
    """Measure what the coordinator keeps, in memory and on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / RUN_FILE).write_text(f'[run]\nname = "bench"\nsites = {sites}\n')
        found = asyncio.run(day(Home.found(Path(folder)), sites, hours))
    Console().print(table(found))
    if json_file:
        json_file.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    cli()
