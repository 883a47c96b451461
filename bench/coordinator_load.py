"""The simulated sites of bench/coordinator.py, each with a key, a TLS connection, a lease and a Watch stream.

Beside them the page is open in a browser, and Prometheus collects the metrics.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import grpc
import grpc.aio
from google.protobuf.message import Message

from pier_coordinator.service.service import SERVICE
from pier_node.identity.certificates import Credentials
from pier_node.identity.tls import channel
from pier_node.wire.carrier import PROTOCOL
from pier_proto.v1.coordinator_pb2 import (
    HeartbeatRequest,
    LinkRecord,
    Record,
    RegisterReply,
    RegisterRequest,
    ReportRequest,
    RoundRecord,
    Sample,
    WatchRequest,
)
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

HEARTBEAT, REPORT = 1.0, 10.0
REGISTERING = 32
"""Sites that register at once."""
PATIENCE = 30.0
SCRAPE = 15


@dataclass(frozen=True)
class Member:
    """A site, as it finds the coordinator."""

    node: str
    own: Credentials
    port: int
    server: str
    run_hash: bytes


@dataclass
class Answers:
    """Seconds that answers took, by method, and the calls that had none."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)


class SimulatedSite:
    """One site."""

    def __init__(self, member: Member, answers: Answers) -> None:
        self._member = member
        self._answers = answers
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        self._channel = channel(f"127.0.0.1:{member.port}", member.server, member.own, options)
        self._calls = {
            name: self._channel.unary_unary(f"/{SERVICE}/{name}", None, None) for name in ("Register", "Report")
        }
        self._lease = b""
        self._sent = 0

    async def register(self) -> None:
        """Connect, begin a lease, and watch for orders. Raises grpc.aio.AioRpcError."""
        request = RegisterRequest(
            protocol=PROTOCOL, run_hash=self._member.run_hash, site=self._site(), time=time.time()
        )
        request.transport, request.version = "grpc", "bench"
        begun = time.perf_counter()
        raw = await self._calls["Register"](request.SerializeToString(), timeout=PATIENCE)
        self._answers.seconds["Register"].append(time.perf_counter() - begun)
        self._lease = RegisterReply.FromString(raw).lease
        watch = self._channel.unary_stream(f"/{SERVICE}/Watch", None, None)
        self._orders = watch(WatchRequest(lease=self._lease).SerializeToString())
        self._beats = self._channel.stream_stream(f"/{SERVICE}/Heartbeat", None, None)(None)
        await self._orders.read()

    async def work(self, seconds: float) -> None:
        """Heartbeats and reports for so long, beginning at any moment of the beat."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(HEARTBEAT, seconds, "Heartbeat", self._heartbeat))
            group.create_task(self._every(REPORT, seconds, "Report", self._report))

    async def leave(self) -> None:
        """Hang up."""
        self._orders.cancel()
        self._beats.cancel()
        await self._channel.close(None)

    async def _every(self, period: float, seconds: float, name: str, request: Callable[[], Message]) -> None:
        due = time.perf_counter() + random.random() * period
        end = time.perf_counter() + seconds
        while due < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            await self._timed(name, request())
            due += period

    async def _timed(self, name: str, request: Message) -> None:
        begun = time.perf_counter()
        try:
            if name == "Heartbeat":
                async with asyncio.timeout(PATIENCE):
                    await self._beats.write(request.SerializeToString())
                    await self._beats.read()
            else:
                await self._calls[name](request.SerializeToString(), timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            self._answers.errors.append(f"{name}: {error.code().name} {error.details()}")
        else:
            self._answers.seconds[name].append(time.perf_counter() - begun)

    def _site(self) -> Site:
        return Site(node=self._member.node, address="10.0.0.1:7700")

    def _heartbeat(self) -> HeartbeatRequest:
        pulse = Pulse(site=self._site(), phase=Phase.PHASE_TRAINING, round=7, inner_step=350, tokens=10**9, loss=2.5)
        return HeartbeatRequest(lease=self._lease, pulse=pulse, order=1)

    def _report(self) -> ReportRequest:
        now = time.time()
        records = [
            Record(time=now, sample=Sample(inner_step=350, tokens=10**9, tokens_per_second=12345.6, loss=2.5)),
            Record(time=now, round=RoundRecord(round=7, digest=bytes(32), members=[self._member.node], compute=9.5)),
            Record(time=now, link=LinkRecord(peer=self._member.node, round_trip=0.05, bandwidth=5e6)),
        ]
        first, self._sent = self._sent, self._sent + len(records)
        return ReportRequest(lease=self._lease, stream=b"bench", first=first, records=records)


class Viewer:
    """The page in a browser, which takes in whatever changes, and Prometheus."""

    def __init__(self, page: str, answers: Answers) -> None:
        self._page, self._answers = page, answers

    async def watch(self, seconds: float) -> None:
        """Look for so long."""
        async with aiohttp.ClientSession(self._page) as session, asyncio.TaskGroup() as group:
            group.create_task(self._changes(session, seconds))
            group.create_task(self._scrapes(session, seconds))

    async def _changes(self, session: aiohttp.ClientSession, seconds: float) -> None:
        await self._get(session, "/api/board")
        async with session.get("/api/stream", timeout=aiohttp.ClientTimeout(None)) as stream:
            try:
                async with asyncio.timeout(seconds):
                    async for _ in stream.content.iter_any():
                        pass
            except TimeoutError:
                pass

    async def _scrapes(self, session: aiohttp.ClientSession, seconds: float) -> None:
        for left in range(math.ceil(seconds), 0, -SCRAPE):
            await self._get(session, "/metrics")
            await asyncio.sleep(min(SCRAPE, left))

    async def _get(self, session: aiohttp.ClientSession, path: str) -> None:
        begun = time.perf_counter()
        async with session.get(path) as answer:
            answer.raise_for_status()
            await answer.read()
        self._answers.seconds[f"GET {path}"].append(time.perf_counter() - begun)


async def load(members: list[Member], page: str, seconds: float, started: Callable[[], None]) -> Answers:
    """Let all sites register, a few at a time, then work; `started` is called in between. `page` is its URL."""
    answers = Answers()
    sites = [SimulatedSite(member, answers) for member in members]
    gate = asyncio.Semaphore(REGISTERING)

    async def register(site: SimulatedSite) -> None:
        async with gate:
            await site.register()

    await asyncio.gather(*map(register, sites))
    started()
    await asyncio.gather(Viewer(page, answers).watch(seconds), *(site.work(seconds) for site in sites))
    await asyncio.gather(*(site.leave() for site in sites))
    return answers
