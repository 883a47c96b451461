"""Score sheets and checkpoints over connections that break in the middle: what has arrived is not sent again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from coordinator.cases import ALICE, OWN, PATIENCE, TOKEN, Running, pulse, register_request
from coordinator.expert_cases import DONE, said, sheet
from coordinator.experts.test_execution import two_sites
from coordinator.experts.test_execution_checkpoints import PLAN, checkpoint
from coordinator.experts.test_scoring import FIRST, evaluating

from pier_node.experts.resume import FILE, Kept
from pier_node.identity.certificates import credentials
from pier_node.outer.layout import Layout
from pier_node.rounds.revocations import Revoked
from pier_node.site.coordinator.client import CoordinatorClient
from pier_node.site.coordinator.link import Link, NoLease, Unreachable
from pier_node.site.coordinator.records import Reports
from pier_node.site.expert_checkpoints import ExpertCheckpoints
from pier_node.site.loop import Orders
from pier_node.wire.files import PART
from pier_proto.v1.coordinator_pb2 import Paths, RegisterRequest, ScoreSheet
from pier_proto.v1.peer_pb2 import Pulse, Site


class Line:
    """A TCP proxy between a site and its coordinator. It holds back what exceeds a limit, until it is cut.

    Attributes:
        carried: bytes that it has carried, "up" to the coordinator and "down" to the site.
    """

    def __init__(self) -> None:
        self.carried = {"up": 0, "down": 0}
        self._limits = {"up": 1 << 60, "down": 1 << 60}
        self._cut = asyncio.Event()
        self._open: list[asyncio.StreamWriter] = []
        self._ways: list[asyncio.Task[None]] = []

    def hold(self, way: str, after: int) -> None:
        """Carry about so many bytes more, and no others."""
        self._limits[way] = self.carried[way] + after

    def cut(self) -> None:
        """Break all connections; those that follow are not limited."""
        self._cut.set()
        for task in self._ways:
            task.cancel()
        for writer in self._open:
            writer.transport.abort()
        self._open, self._ways = [], []

    @asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[int]:
        """Listen; yield the port."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, onward = await asyncio.open_connection("127.0.0.1", port)
            self._open += [writer, onward]
            ways = self._carry(reader, onward, "up"), self._carry(there, writer, "down")
            self._ways += map(asyncio.create_task, ways)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.cut()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str) -> None:
        with suppress(ConnectionError):
            while data := await source.read(16 << 10):
                if self.carried[way] > self._limits[way]:
                    await self._cut.wait()
                self.carried[way] += len(data)
                sink.write(data)
                await sink.drain()
        sink.close()


class Played:
    """A site as its client sees it."""

    def __init__(self) -> None:
        self.orders, self.reports = Orders(), Reports()

    def registration(self) -> RegisterRequest:
        return register_request(ALICE)

    def pulse(self) -> Pulse:
        return pulse(ALICE)

    def paths(self) -> Paths | None:
        return None

    def stop(self) -> None:
        raise AssertionError("nobody wants this site to stop")

    def meet(self, sites: Iterable[Site]) -> None:
        pass


@asynccontextmanager
async def client_at(port: int, folder: Path) -> AsyncIterator[CoordinatorClient]:
    """A client that keeps in touch with its coordinator."""
    site: Any = Played()
    own = credentials(ALICE, TOKEN)
    revoked = Revoked(folder, own.ca_pem, bytes(32), lambda _: None)
    client = CoordinatorClient(Link(f"127.0.0.1:{port}", OWN.node, own), site, site.orders, site.reports, revoked)
    work = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        work.cancel()
        await asyncio.wait([work])
        await client.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - the other side of a socket changes it
            await asyncio.sleep(0.05)


def part_in(folder: Path) -> int:
    """Bytes of what has arrived in part."""
    return max((path.stat().st_size for path in folder.rglob(f"*{PART}")), default=0)


async def give(client: CoordinatorClient, kept: Kept, path: Path) -> None:
    """Give a checkpoint, as a site does that another site waits for."""
    with path.open("rb") as file:
        while True:
            with suppress(NoLease, Unreachable):
                return await client.give_checkpoint(PLAN.id, kept, file)
            await asyncio.sleep(0.2)


def kept_of(raw: bytes, job: int, step: int) -> Kept:
    return Kept(job=job, step=step, size=len(raw), digest=hashlib.sha256(raw).hexdigest())


async def test_a_checkpoint_that_is_given_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    line, there = Line(), tmp_path / "there"
    raw = checkpoint(tmp_path, 40)
    there.mkdir()
    async with two_sites(there) as run, line.to(run.port) as port, client_at(port, tmp_path) as client:
        await run.coordinator.experts.accept(PLAN)
        kept = kept_of(raw, 2, 40)
        line.hold("up", len(raw) // 2)
        giving = asyncio.create_task(give(client, kept, tmp_path / FILE))
        await until(lambda: part_in(there) > len(raw) // 4)
        line.cut()
        before = line.carried["up"]
        async with asyncio.timeout(PATIENCE):
            await giving
        assert line.carried["up"] - before < 0.9 * len(raw), "a quarter of it was there"
        assert held(run, there) == raw


def held(run: Running, folder: Path) -> bytes:
    """The checkpoint that the coordinator keeps."""
    (path,) = (path for path in (folder / "checkpoints").rglob("*") if path.is_file())
    return path.read_bytes()


async def test_a_score_sheet_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    line, there = Line(), tmp_path / "there"
    content = sheet("topics", "topics", rows=60_000).packed()
    there.mkdir()
    async with two_sites(there) as run, line.to(run.port) as port, client_at(port, tmp_path) as client:
        id = await evaluating(run, tmp_path / "scores")
        line.hold("up", len(content) // 2)
        giving = asyncio.create_task(client.deliver(ScoreSheet(scoring=id, expert=FIRST), content))
        await until(lambda: part_in(there) > len(content) // 4)
        line.cut()
        before = line.carried["up"]
        async with asyncio.timeout(PATIENCE):
            await giving
        assert line.carried["up"] - before < 0.9 * len(content)
        assert [path.read_bytes() for path in (tmp_path / "scores" / id).iterdir()] == [content]
        assert part_in(there) == 0


async def test_a_checkpoint_that_is_fetched_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    line, there, here = Line(), tmp_path / "there", tmp_path / "here"
    raw = checkpoint(tmp_path, 40)
    here.mkdir()
    there.mkdir()
    async with two_sites(there) as run, line.to(run.port) as port, client_at(port, tmp_path) as client:
        await run.coordinator.experts.accept(PLAN)
        kept = kept_of(raw, 2, 40)
        await give(client, kept, tmp_path / FILE)
        job = PLAN.jobs[2].job
        length = Layout.of(job.run(run.coordinator.config).model).length
        ours = ExpertCheckpoints(client).of(PLAN.id, job, kept, False)
        line.hold("down", len(raw) // 2)
        fetching = asyncio.create_task(ours.fetched(here, "ab" * 16, length, 0))
        await until(lambda: part_in(here) > len(raw) // 4)
        line.cut()
        before = line.carried["down"]
        async with asyncio.timeout(PATIENCE):
            assert await fetching
        assert line.carried["down"] - before < 0.9 * len(raw)
        assert (here / FILE).read_bytes() == raw
        await run.coordinator.experts.take(ALICE.node, [said(PLAN, ALICE.node, 2, **DONE)])
